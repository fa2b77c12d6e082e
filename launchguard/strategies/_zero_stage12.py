"""ZeRO-1 and ZeRO-2: zero/stage_1_and_2.py:DeepSpeedZeroOptimizer (deepspeed 0.19.8)."""

from __future__ import annotations

from dataclasses import dataclass, field

from launchguard.events import Category
from launchguard.strategies._zero_base import FLOAT32, NORM_BYTES, REDUCE_STREAM, Storage, ZeroEngine
from launchguard.strategies._zero_flat import FlatGroup, Slice, round_robin
from launchguard.units import dtype_bytes


@dataclass
class Bucket:
    """IPGBucket of one communication dtype."""

    dtype: str
    params: list[int] = field(default_factory=list)
    elements: int = 0
    index: int = 0
    oversized: bool = False
    buffers: list[Storage] = field(default_factory=list)
    grads: list[Storage] = field(default_factory=list)  # only without contiguous_gradients

    def clear(self) -> None:
        for g in self.grads:
            g.drop()
        self.params, self.elements, self.oversized, self.grads = [], 0, False, []


def flat_groups(groups: list[list[int]], numel: list[int], world: int, reorder: bool) -> list[FlatGroup]:
    return [FlatGroup(round_robin(g, world) if reorder else g, numel, world) for g in groups]


class PartitionedEngine(ZeroEngine):
    """Optimizer states partitioned; stage 2 keeps only its own gradients, stage 1 all of them until the boundary."""

    def prepare(self) -> None:
        zero = self.zero
        self.stage2 = zero.stage == 2
        self.contiguous = zero.contiguous_gradients or self.offload
        self.separate_acc = self.acc_dtype != self.dtype and not self.stage2  # use_grad_accum_attribute
        self.compact = self.acc_dtype == "float32" and self.dtype != "float32"  # _use_compact_grad_partition_buffer
        self.bucket_dtype = self.acc_dtype if self.separate_acc else self.dtype
        self.bucket_bytes = self.acc if self.separate_acc else self.b
        self.side = REDUCE_STREAM if zero.overlap_comm else 0
        self.flat = flat_groups(self.groups, self.numel, self.world, zero.round_robin_gradients)
        self.members = [g.members(self.rank) for g in self.flat]
        self.position = {s.param: s for group in self.members for s in group}
        self.group_of = {i: k for k, g in enumerate(self.flat) for i in g.order}
        self.comm_of = self.communication_dtypes()
        self.buckets = {name: Bucket(name) for name in sorted({self.comm_of[i] for i in self.group_of})}
        self.grads: dict[int, Storage] = {}  # p.grad, or p.grad_accum with a separate accumulator
        self.pending: list[int] = []  # previous_reduced_grads
        self.partition_buffer: Storage | None = None
        self.accumulated: dict[int, list[Storage]] = {}
        self.averaged: dict[int, list[Storage]] = {}
        self.offload_norms: list[int] = []
        self.micro_step, self.ready = -1, False
        self._initialise()

    # __init__ ------------------------------------------------------------------------------------------------------
    def _initialise(self) -> None:
        stream = self.stream
        self.model_to_device()
        self.first_optimizer()
        if not self.offload:
            self.overflow_flag()
        for group in self.flat:
            self._flatten(group)
            clone = stream.alloc(group.size * self.b, Category.TEMPORARIES, "flattening")
            if self.offload:
                self._host_group(group)
                stream.free(clone)
            elif self.dtype == self.master_dtype:
                continue  # the clone itself is the master copy
            else:
                stream.alloc(group.size * self.master, Category.OPTIMIZER_STATES, "fp32 master partition")
                stream.free(clone)
        if self.offload:
            largest = max(self.numel[i] for i in self.group_of)
            stream.alloc(largest * self.b, Category.COMMUNICATION, "offload gradient buffer")
            self.keep_host("gradient staging", self.pinned(largest * self.b))
            unpinned = max(g.size for g in self.flat) * self.master if self.zero.offload_pin_memory else 0
            self.mark_host("prepare", {"pageable copies while pinning": unpinned})
        else:
            grads = [stream.alloc(g.size * self.master, Category.GRADIENTS, "fp32 gradient partition") for g in self.flat]
            self.optimizers = [self.optimizer_of([g.size]) for g in self.flat]
            stream.free(*grads)

    def _flatten(self, group: FlatGroup) -> None:
        """Parameters and their flat copy coexist, unless the card has no room: then the copy is made on the host."""
        stream = self.stream
        stream.empty_cache()
        nbytes = group.padded * self.b
        single = len(group.order) == 1 and group.padded == group.total  # flattening one tensor gives a view of it
        if single:
            return
        old = [self.model.pop(i) for i in group.order]
        on_host = self.allocated_bytes() + nbytes > self.device.total_bytes
        if on_host:
            stream.free(*old)
            stream.empty_cache()
        pad = stream.alloc(0 if on_host else (group.padded - group.total) * self.b, Category.TEMPORARIES, "flattening")
        stream.alloc(nbytes, Category.PARAMETERS, f"flat {self.word} parameters")
        stream.free(pad, *(() if on_host else old))

    def allocated_bytes(self) -> int:
        """Bytes of the model as it came to the device (accelerator.available_memory subtracts what is allocated)."""
        return sum(self.param_bytes(i) for i in range(len(self.numel))) + sum(self.trace.buffer_bytes)

    def _host_group(self, group: FlatGroup) -> None:
        self.keep_host("fp32 master partition", self.pinned(group.size * self.master))
        self.keep_host("fp32 gradient partition", self.pinned(group.size * self.master))
        self.keep_host("16-bit parameter staging", self.pinned(group.size * self.b))

    # backward ------------------------------------------------------------------------------------------------------
    def grad(self, param: int, handle: int) -> None:
        """The gradient hook, process_gradients. Autograd holds the new gradient until the hook returns."""
        new = self.own(handle)
        if self.separate_acc:
            self._hooked(param, new)
        elif param in self.grads:  # added in place by autograd
            self._hooked(param, None)
            new.drop()
        else:
            self.grads[param] = new.view()
            self._hooked(param, None)
            new.drop()

    def _hooked(self, param: int, separate: Storage | None) -> None:
        if self.stage2 or self.zero.overlap_comm or self.separate_acc or self.contiguous:
            self._setup_buckets()
        if separate is not None:
            self._accumulate_separately(param)
        if self.stage2 or (self.zero.overlap_comm and self.boundary):
            self._to_bucket(param)
        if separate is not None:
            separate.drop()

    def _accumulate_separately(self, param: int) -> None:
        """_fill_param_grad_accum_attribute."""
        cast = self.stream.alloc(self.numel[param] * self.acc, Category.GRADIENTS, "accumulated gradients")
        if param in self.grads:
            self.stream.free(cast)
        else:
            self.grads[param] = self.own(cast)

    def _setup_buckets(self) -> None:
        """The first gradient of a backward allocates the whole bucket, two with overlap_comm."""
        if self.ready:
            return
        self.ready = True
        self.micro_step += 1
        if not self.contiguous:
            return
        nbytes = self.zero.reduce_bucket_size * self.bucket_bytes
        for bucket in self.buckets.values():
            bucket.index = 0
            for _ in range(2 if self.zero.overlap_comm else 1):
                bucket.buffers.append(self.own(self.stream.alloc(nbytes, Category.COMMUNICATION, "ipg bucket")))

    def _to_bucket(self, param: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads."""
        bucket, n = self.buckets[self.comm_of[param]], self.numel[param]
        if bucket.elements + n > self.zero.reduce_bucket_size:
            self._reduce(bucket)
            if self.contiguous and self.zero.overlap_comm:
                bucket.index = 1 - bucket.index
        grad = self.grads[param]
        if not self.contiguous:
            bucket.grads.append(grad.view())
        elif n <= self.zero.reduce_bucket_size:
            self.grads[param] = bucket.buffers[bucket.index].view()
            grad.drop()
        else:
            bucket.oversized = True
            if self.offload:
                self.grads[param] = self.own(self.stream.alloc(n * self.bucket_bytes, Category.GRADIENTS, "gradients"))
                grad.drop()
        bucket.params.append(param)
        bucket.elements += n

    def _reduce(self, bucket: Bucket) -> None:
        """reduce_ipg_grads: average, then keep what this rank owns and let go of the rest."""
        if bucket.params:
            self._average(bucket)
        for param in bucket.params:
            owned = param in self.position
            if self.stage2 and not owned:
                if self.zero.overlap_comm and not self.contiguous:
                    self.pending.append(param)  # cleared by the next reduction, when this one is surely over
                else:
                    self.grads.pop(param).drop()
            elif owned and self.contiguous:
                self._keep(param)
        bucket.clear()

    def _average(self, bucket: Bucket) -> None:
        total = bucket.elements
        if not self.contiguous:  # buffered_reduce_fallback
            if self.zero.overlap_comm:
                self._clear_pending()
            self._reduce_copy(bucket.dtype, total, copies=len(bucket.params) > 1, owned=bucket.params)
        elif not self.zero.reduce_scatter:  # gradient_reduction_w_predivide: in place
            self._reduce_copy(bucket.dtype, total, copies=False, owned=bucket.params)
        else:
            slices = self._reduce_slices(bucket)
            for param in [p for _, owned in slices for p in owned]:  # outputs are looked up before anything is reduced
                self._compact_partition(self.group_of[param])
            for numels, owned in slices:
                self._reduce_copy(bucket.dtype, sum(numels), copies=len(numels) > 1, owned=owned)

    def _reduce_slices(self, bucket: Bucket) -> list[tuple[list[int], list[int]]]:
        """average_tensor: the bucket cut at partition boundaries, neighbours of one rank joined (unless they go to a compact partition),
        then grouped into at most one bucket size. Gives (elements of each slice, parameters owned here) per collective."""
        collectives: list[tuple[list[int], list[int]]] = []
        numels: list[int] = []
        owned: list[int] = []
        previous = -1
        for param in bucket.params:
            for rank, n in self.flat[self.group_of[param]].cuts(param):
                compact = self.compact and rank == self.rank
                if numels and rank == previous and not compact:
                    numels[-1] += n
                else:
                    if sum(numels) > self.zero.reduce_bucket_size:
                        collectives.append((numels, owned))
                        numels, owned = [], []
                    numels.append(n)
                if compact:
                    owned.append(param)
                previous = rank
        return [*collectives, (numels, owned)]

    def _reduce_copy(self, dtype: str, total: int, copies: bool, owned: list[int]) -> None:
        """allreduce_bucket: a flat copy of several slices, another in the communication dtype; both until results are copied back."""
        stream = self.stream
        flat = stream.alloc(total * self.bucket_bytes if copies else 0, Category.COMMUNICATION, "reduce copy", self.side)
        cast = 0
        if dtype != self.bucket_dtype:
            cast = stream.alloc(total * dtype_bytes(dtype), Category.COMMUNICATION, "reduce copy", self.side)
            stream.free(flat)
        if self.compact:
            self._add_to_compact(dtype, [p for p in owned if p in self.position])
        stream.free(cast or flat)

    def _add_to_compact(self, dtype: str, owned: list[int]) -> None:
        """_get_compact_grad_partition_slice and _add_to_grad_partition_buffer: float32 results go straight to the owned partition."""
        for param in owned:
            group = self.group_of[param]
            self._compact_partition(group)
            if dtype != self.acc_dtype:
                self.stream.touch(self.position[param].numel * self.acc, Category.GRADIENTS, "averaged gradients", self.side)

    def _compact_partition(self, group: int) -> None:
        if group not in self.averaged:
            nbytes = self.flat[group].size * self.acc
            self.averaged[group] = [self.own(self.stream.alloc(nbytes, Category.GRADIENTS, "averaged gradients", self.side))]

    def _clear_pending(self) -> None:
        for param in self.pending:
            self.grads.pop(param).drop()
        self.pending = []

    def _keep(self, param: int) -> None:
        """copy_grads_in_partition."""
        if self.offload:
            self._keep_on_host(param)
        elif self.compact:
            if self.separate_acc:
                self.grads.pop(param).drop()
        else:
            if self.partition_buffer is None:
                total = sum(self.numel[p] for p in self.position)
                handle = self.stream.alloc(total * self.b, Category.GRADIENTS, "averaged gradients", self.side)
                self.partition_buffer = self.own(handle)
            old, self.grads[param] = self.grads[param], self.partition_buffer.view()
            old.drop()

    def _keep_on_host(self, param: int) -> None:
        """copy_grads_in_partition with offload: accumulate on the host; at the boundary take the norm, cast, copy out."""
        n = self.position[param].numel
        if self.compact:
            self._compact_partition(self.group_of[param])
        elif self.micro_step > 0 or not self.boundary:
            self.host_accumulators()
        if not self.boundary:
            return
        self.stream.touch(n * NORM_BYTES, Category.TEMPORARIES, "gradient norm", self.side)
        self.offload_norms.append(self.stream.alloc(NORM_BYTES, Category.TEMPORARIES, "gradient norm", self.side))
        if not self.compact and self.dtype_differs_from_master():
            self.stream.touch(n * self.master, Category.TEMPORARIES, "gradients on their way to the host", self.side)
        self.grads.pop(param).drop()

    def dtype_differs_from_master(self) -> bool:
        return self.bucket_dtype != self.master_dtype

    def host_accumulators(self) -> None:
        """async_accumulate_grad_in_cpu_via_gpu: one pinned buffer per owned parameter, for the rest of the run."""
        if "accumulated gradients" not in self.host and self.master == FLOAT32:
            self.keep_host("accumulated gradients", sum(self.pinned(self.numel[p] * self.b) for p in self.position))

    def backward_end(self) -> None:
        """engine.py:allreduce_gradients. Stage 1 reduces at the boundary only, in parameter order."""
        if not self.stage2:
            if not self.boundary:
                return
            if not self.zero.overlap_comm:
                for group in self.flat:
                    for param in sorted(group.order):
                        if param in self.grads:
                            self._to_bucket(param)
        self._epilogue()

    def _epilogue(self) -> None:
        """independent_gradient_partition_epilogue."""
        for bucket in self.buckets.values():
            self._reduce(bucket)
        if self.zero.overlap_comm:
            self._clear_pending()
        dropped: list[Storage] = []
        if not self.offload:
            for k, members in enumerate(self.members):
                dropped += self._collect(k, members)
        for bucket in self.buckets.values():
            for buffer in bucket.buffers:
                buffer.drop()
            bucket.buffers = []
        if self.partition_buffer is not None:
            self.partition_buffer.drop()
            self.partition_buffer = None
        self.ready = False
        if not self.separate_acc:
            self._clear_grads()
        for storage in dropped:
            storage.drop()

    def _collect(self, k: int, members: list[Slice]) -> list[Storage]:
        """all_grad_tensors and averaged_gradients of one group; returns this micro-batch's tensors when they were only added to others."""
        if self.compact:
            if self.boundary:
                self._compact_partition(k)
            return []
        new = [self.grads[s.param].view() if s.param in self.grads else self._zeros(s.param) for s in members]
        added = k in self.accumulated
        if not added:
            self.accumulated[k] = new
        if self.boundary:
            self.averaged[k] = self.accumulated.pop(k)
            missing = self.flat[k].size - sum(s.numel for s in members)
            self.averaged[k].append(self.own(self.stream.alloc(missing * self.acc, Category.GRADIENTS, "averaged gradients")))
        return new if added else []

    def _zeros(self, param: int) -> Storage:
        """get_all_grad_tensors: a parameter without a gradient gets zeros."""
        return self.own(self.stream.alloc(self.numel[param] * self.acc, Category.GRADIENTS, "averaged gradients"))

    def _clear_grads(self) -> None:
        for g in self.grads.values():
            g.drop()
        self.grads = {}

    # step ----------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        self.micro_step = -1
        if self.offload:
            self._step_on_host()
        else:
            for members in self.members:
                self.norms([s.numel for s in members], NORM_BYTES)
            for k, group in enumerate(self.flat):
                self._step_group(k, group)
        self._clear_grads()

    def _step_group(self, k: int, group: FlatGroup) -> None:
        stream = self.stream
        for param in group.order:  # free_grad_in_param_list(params_not_in_partition)
            if param not in self.position and param in self.grads:
                self.grads.pop(param).drop()
        tensors = len(self.members[k]) + (1 if self.padded_here(k) else 0)
        flat = 0
        if not self.compact and tensors > 1:
            flat = stream.alloc(group.size * self.acc, Category.GRADIENTS, "flat gradient partition")
        cast = 0
        if self.acc_dtype != self.master_dtype:
            cast = stream.alloc(group.size * self.master, Category.GRADIENTS, "fp32 gradient partition")
            stream.free(flat)
        viewed = not flat and not cast
        for param in [s.param for s in self.members[k]]:
            if param in self.grads:
                self.grads.pop(param).drop()
        averaged = self.averaged.pop(k, [])
        if not viewed:
            self._drop(averaged)
        self.optimizers[k].step()
        stream.free(cast or flat)
        if viewed:
            self._drop(averaged)

    def padded_here(self, k: int) -> bool:
        """Does this rank's partition of a group end in padding?"""
        return sum(s.numel for s in self.members[k]) < self.flat[k].size

    @staticmethod
    def _drop(storages: list[Storage]) -> None:
        for s in storages:
            s.drop()

    def _step_on_host(self) -> None:
        self.host_moments([g.size for g in self.flat])
        for k in list(self.averaged):
            self._drop(self.averaged.pop(k))
        self.stream.free(*self.offload_norms)
        self.offload_norms = []
        self.mark_host("step_1" if len(self.host_phases) < 2 else "step_2")
