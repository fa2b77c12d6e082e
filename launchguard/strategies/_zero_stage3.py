"""ZeRO-3: zero/stage3.py, zero/parameter_offload.py and zero/partition_parameters.py (deepspeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launchguard.events import Category, StepTrace
from launchguard.job import JobSpec, OptimizerSpec, SavingSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._zero3_coordinator import AVAILABLE, Coordinator, Flight
from launchguard.strategies._zero3_linear import keep_linear_inputs
from launchguard.strategies._zero3_packed import PackedWeights
from launchguard.strategies._zero_base import ALLGATHER_STREAM, NORM_BYTES, REDUCE_STREAM, ZeroEngine
from launchguard.strategies.optimizer_step import OptimizerStates, SteppedTensor
from launchguard.units import ceil_div, dtype_bytes

# zero/leaf_module_config.py:DEFAULT_LEAF_MODULE_CLASSES: fetched whole, no hooks inside
LEAF_CLASSES = frozenset({"MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"})
_NORM_CHUNK = 250_000_000  # stage3.py:_constant_buffered_norm2, elements


@dataclass
class Bucket:
    """IPGBucketZ3 of one communication dtype. grads: (parameter, handle of its own gradient; 0: it lies in the bucket's buffer)."""

    dtype: str
    grads: list[tuple[int, int]] = field(default_factory=list)
    filled: int = 0


class ShardedEngine(ZeroEngine):
    """Parameters, gradients and optimizer states partitioned; every parameter on its own, padded to the number of ranks."""

    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        super().__init__(job, keep_linear_inputs(trace), rank, device)

    # load and prepare ----------------------------------------------------------------------------------------------
    def load(self) -> None:
        """Under deepspeed.zero.Init a module's parameters are made on the device, cast, and partitioned when its __init__ ends."""
        params = self.trace.params
        self.q = [ceil_div(n, self.world) for n in self.numel]
        self.dtypes = [p.dtype for p in params]  # the engine's, but for adapters added to a model of zero.Init, and packed weights
        self.bytes = [dtype_bytes(name) for name in self.dtypes]
        self.trained = params[self.groups[0][0]].dtype  # stage3.py: self.dtype
        self.added = {i for i, p in enumerate(params) if p.requires_grad and self.job.lora is not None}
        self.parts: dict[int, int] = {}
        self.secondary: dict[int, int] = {}
        self.persistent = [n <= self.zero.stage3_param_persistence_threshold for n in self.numel]
        self.offload_param = self.zero.offload_param != "none"
        if self.zero.zero_init:
            self.alloc_buffers()
            self._load_partitioned()

    def _load_partitioned(self) -> None:
        """Module by module; a tied parameter is made and partitioned once per owner, until the model ties them. Adapters come later."""
        made = dtype_bytes(self.job.precision.load)
        owned: dict[int, list[int]] = {}
        for i, p in enumerate(self.trace.params):
            for module in p.owners if i not in self.added else ():
                owned.setdefault(module, []).append(i)
        duplicates = []
        for module in sorted(owned):
            for i in owned[module]:
                self._create(i, made)
            for i in owned[module]:
                first = self.parts.get(i, 0)
                self._partition(i)
                duplicates.append(first)
        self.stream.free(*duplicates)

    def _create(self, i: int, made: int) -> None:
        first = self.stream.alloc(self.numel[i] * made, Category.PARAMETERS, "parameters being created")
        if made != self.b:
            self.model[i] = self.stream.alloc(self.param_bytes(i), Category.PARAMETERS, f"{self.word} parameters")
            self.stream.free(first)
        else:
            self.model[i] = first

    def prepare(self) -> None:
        zero = self.zero
        if not zero.zero_init:
            self.model_to_device()
            self.first_optimizer()
        if not self.offload:
            self.overflow_flag()
        if not zero.zero_init:
            for i in range(len(self.numel)):
                self._partition(i)
        for i in sorted(self.added) if zero.zero_init else ():  # partition_parameters.py:_convert_to_zero_parameters
            self.model[i] = self.stream.alloc(self.numel[i] * self.bytes[i], Category.PARAMETERS, "adapters")
            self._partition(i)
        self.stream.alloc(0 if self.offload else 1, Category.TEMPORARIES, "overflow flag")  # inf_or_nan_tracker
        self.gathered: dict[int, int] = {}
        self.saved: dict[int, list[int]] = {}
        self.recomputing = False
        self.packed = PackedWeights(self.job, self.trace)
        communicated = self.communication_dtypes()  # partition_parameters.py:get_allgather_dtype: only torch_autocast changes it
        self.gather_dtype = communicated if zero.torch_autocast else dict(enumerate(self.dtypes))
        self.gather_stream = ALLGATHER_STREAM if zero.overlap_comm else 0
        self.side = REDUCE_STREAM if zero.overlap_comm else 0
        self._make_modules()
        self._make_states()
        self._make_gradients()
        for i in self.params:  # create_reduce_and_remove_grad_hooks gathers each parameter once
            gathered = self.stream.alloc(self._padded(i) * self.bytes[i], Category.PARAMETERS, "gathered parameters")
            if self.offload_param:
                self.stream.touch(self.q[i] * self.bytes[i], Category.COMMUNICATION, "all-gather")
            self.stream.free(gathered)
        self.mark_host("prepare", self._host_transient())

    def _host_transient(self) -> dict[str, int]:
        """What the host's peak of set-up is above what stays: the larger of two."""
        moments = [self._flattening_on_host(), self._gradient_buffers_at_init()]
        return max(moments, key=lambda found: sum(found.values()))

    def _flattening_on_host(self) -> dict[str, int]:
        """_create_param_groups_fp16_flat_cpu_memory: every group's flat buffer is pinned from a pageable one, and the partitions are moved
        into them afterwards."""
        if not self.offload_param:
            return {}
        groups = [sum(self.q[i] * self.bytes[i] for i in group) for group in self.groups]
        peak = sum(groups) + max(sum(groups[: k + 1]) + groups[k] for k in range(len(groups)))
        return {"parameter partitions while they are flattened": max(0, peak - sum(self.host.values()))}

    def _gradient_buffers_at_init(self) -> dict[str, int]:
        """initialize_optimizer_states: a shared gradient buffer of the largest sub-group beside the pinned ones, each of which is filled
        from a pageable one; the averaged gradients come later."""
        if not self.offload:
            return {}
        largest = max(self.sizes) * self.master
        pageable = largest if self.zero.offload_pin_memory else 0
        return {"gradient buffers at init": max(0, largest + pageable - self.host["averaged gradients"])}

    def _partition(self, i: int) -> None:
        """partition_parameters.py:_partition_param, and the secondary copy of hpZ."""
        stream = self.stream
        k = self.zero.zero_hpz_partition_size
        if k > 1:
            self._make_secondary(i)
        if not self.offload_param:  # small ones too: Init knows no persistence threshold before the engine marks them
            self.parts[i] = stream.alloc(self.q[i] * self.bytes[i], Category.PARAMETERS, f"{self.word} partition")
        stream.free(self.model.pop(i))

    def _make_secondary(self, i: int) -> None:
        if i not in self.secondary:
            nbytes = self.q[i] * self.world // self.zero.zero_hpz_partition_size * self.bytes[i]
            self.secondary[i] = self.stream.alloc(nbytes, Category.PARAMETERS, "hpZ secondary partition")

    def _make_modules(self) -> None:
        """parameter_offload.py: hooks on every module, none inside a leaf module, which fetches all that it holds."""
        modules = self.trace.modules
        self.leaf_of = [-1] * len(modules)
        for m, info in enumerate(modules):
            above = self.leaf_of[info.parent] if info.parent >= 0 else -1
            self.leaf_of[m] = above if above >= 0 else m if info.cls in LEAF_CLASSES else -1
        self.hooked = [leaf < 0 or leaf == m for m, leaf in enumerate(self.leaf_of)]
        params_of: list[list[int]] = [[] for _ in modules]
        for i, p in enumerate(self.trace.params):
            for m in dict.fromkeys(self.leaf_of[o] if self.leaf_of[o] >= 0 else o for o in p.owners):
                params_of[m].append(i)
        self.params_of = params_of
        self.leaf_params = {i: m for m, params in enumerate(params_of) if self.leaf_of[m] == m for i in params}
        self.held_in_leaf: dict[int, list[tuple[int, int]]] = {}
        self.weight_of = self._linear_biases()
        self.held_bias: dict[int, tuple[int, int]] = {}
        self.seen: set[int] = set()
        zero = self.zero
        self.coordinator = Coordinator(
            self, params_of, self.numel, self.persistent, [p.requires_grad for p in self.trace.params],
            zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance,
        )  # fmt: skip

    def _linear_biases(self) -> dict[int, int]:
        """Bias -> weight of linear layers that train both."""
        params = self.trace.params
        index = {p.name: i for i, p in enumerate(params)}
        pairs = {}
        for i, p in enumerate(params):
            weight = index.get(p.name.removesuffix("bias") + "weight", -1)
            linear = p.name.endswith("bias") and weight >= 0 and self.trace.modules[p.module].cls == "Linear"
            if linear and p.requires_grad and params[weight].requires_grad:
                pairs[i] = weight
        return pairs

    # states --------------------------------------------------------------------------------------------------------
    def _make_states(self) -> None:
        """stage3.py:_create_fp16_partitions_with_defragmentation, _create_fp32_partitions, initialize_optimizer_states."""
        stream = self.stream
        self.params = [i for group in self.groups for i in group]
        self.subgroups = [s for group in self.groups for s in self._split(group)]
        self.sizes = [sum(self.q[i] for i in s) for s in self.subgroups]
        total = sum(self.sizes)
        nbytes = total * dtype_bytes(self.trained)
        stream.free(*(self.parts.pop(i, 0) for i in self.params))
        if self.offload_param:
            self.keep_host("parameter partition", self.pinned(nbytes))
        else:
            stream.empty_cache()
            stream.alloc(nbytes, Category.PARAMETERS, f"{self.word} partition")
        on_host = len(self.sizes) - int((1 - self.zero.offload_ratio) * len(self.sizes)) if self.offload else 0
        self.device_groups = range(len(self.sizes) - on_host)
        self.host_groups = range(len(self.sizes) - on_host, len(self.sizes))
        self._make_masters()
        if self.offload:
            for k in self.host_groups:
                self.keep_host("fp32 master partition", self.sizes[k] * self.master)
                self.keep_host("fp32 gradient partition", self.pinned(self.sizes[k] * self.master))
            for k in self.device_groups:
                stream.alloc(self.sizes[k] * self.master, Category.GRADIENTS, "fp32 gradient partition")
        else:
            stream.touch(max(self.sizes) * self.master, Category.GRADIENTS, "fp32 gradient partition")
        self.optimizers = [self._optimizer(k) for k in self.device_groups]

    def _split(self, group: list[int]) -> list[list[int]]:
        """_create_fp16_sub_groups: a sub-group closes with the parameter that fills it."""
        limit = self.zero.sub_group_size
        if limit >= sum(self.q[i] for i in group):
            return [group]
        groups: list[list[int]] = [[]]
        filled = 0
        for i in group:
            if filled >= limit:
                groups.append([])
                filled = 0
            groups[-1].append(i)
            filled += self.q[i]
        return groups

    def _make_masters(self) -> None:
        """`.to()` and `.clone()` of each sub-group coexist; the converted one lives until the next is made."""
        stream, converted = self.stream, 0
        for k in self.device_groups:
            nbytes = self.sizes[k] * self.master
            if self.trained != self.master_dtype:
                previous, converted = converted, stream.alloc(nbytes, Category.TEMPORARIES, "fp32 master partition")
                stream.free(previous)
            stream.alloc(nbytes, Category.OPTIMIZER_STATES, "fp32 master partition")
        stream.free(converted)

    def _optimizer(self, k: int) -> OptimizerStates:
        """The optimizer over one sub-group; a partly offloaded job updates those on the device with torch's AdamW."""
        if self.offload:
            spec = OptimizerSpec("adamw", "foreach", self.job.optimizer.params)
            return OptimizerStates(self.stream, spec, [[SteppedTensor((self.sizes[k],), self.master_dtype)]])
        return self.optimizer_of([self.sizes[k]])

    def _make_gradients(self) -> None:
        """_setup_for_real_optimizer: the ipg bucket is allocated at init, for good; so are the gradient partitions."""
        zero, total = self.zero, sum(self.sizes)
        self.comm_of = self.communication_dtypes()
        self.buckets = {name: Bucket(name) for name in sorted({self.comm_of[i] for i in self.params})}
        for name in self.buckets if zero.contiguous_gradients else ():
            self.stream.alloc(zero.reduce_bucket_size * dtype_bytes(name), Category.COMMUNICATION, "ipg bucket")
        if self.offload:
            self.keep_host("averaged gradients", self.pinned(total * self.acc))
        else:
            self.stream.alloc(total * self.acc, Category.GRADIENTS, "averaged gradients")

    # gathers: the Memory that the coordinator drives ---------------------------------------------------------------
    def gather(self, params: Sequence[int]) -> Flight:
        """all_gather_coalesced. One parameter: the gathered buffer is the parameter. Several: one flat buffer, copied on arrival.
        Under torch_autocast the buffers are in the communication dtype and the parameter is a cast of them."""
        stream, multiple = self.stream, len(params) > 1
        if self.world == 1:
            for i in params:
                nbytes = self.numel[i] * self.bytes[i] if self.offload_param else 0
                self.gathered[i] = stream.alloc(nbytes, Category.PARAMETERS, "gathered parameters", self.gather_stream)
            return Flight(params, ())
        flats = []
        for dtype in sorted({self.gather_dtype[i] for i in params}):
            batch = [i for i in params if self.gather_dtype[i] == dtype]
            nbytes = sum(self._padded(i) for i in batch) * dtype_bytes(dtype)
            if multiple or dtype != self.dtypes[batch[0]]:
                flats.append(stream.alloc(nbytes, Category.COMMUNICATION, "all-gather", self.gather_stream))
            else:
                self.gathered[params[0]] = stream.alloc(nbytes, Category.PARAMETERS, "gathered parameters", self.gather_stream)
            self._send(batch, dtype)
        return Flight(params, flats)

    def _send(self, batch: Sequence[int], dtype: str) -> None:
        """What goes into a gather: partitions that lie on the host, or in another dtype, are copied first."""
        if self.offload_param or dtype != self.dtypes[batch[0]]:
            stream, n = self.stream, dtype_bytes(dtype)
            copies = [stream.alloc(self.q[i] * n, Category.COMMUNICATION, "all-gather", self.gather_stream) for i in batch]
            stream.free(*copies)

    def _padded(self, i: int) -> int:
        return self.q[i] * self.world

    def arrive(self, flight: Flight) -> None:
        stream = self.stream
        for i in flight.params if flight.flats else ():
            joined = 0
            if self.gather_dtype[i] != self.dtypes[i] and len(flight.params) > 1:
                nbytes = self.numel[i] * dtype_bytes(self.gather_dtype[i])
                joined = stream.alloc(nbytes, Category.COMMUNICATION, "all-gather", self.gather_stream)
            self.gathered[i] = stream.alloc(self.numel[i] * self.bytes[i], Category.PARAMETERS, "gathered parameters", self.gather_stream)
            stream.free(joined)

    def land(self, flight: Flight) -> None:
        self.stream.free(*flight.flats)

    def release(self, param: int) -> None:
        """free_param. What is recomputed may keep the gathered storage until the parameter's own backward, and a node of the graph to its
        end, whatever becomes of param.data."""
        if self.zero.zero_hpz_partition_size > 1:
            self._make_secondary(param)
        handle = self.gathered.pop(param)
        if self.recomputing:
            self.saved.setdefault(param, []).append(handle)
        elif not self.packed.released(handle):
            self.stream.free(handle)

    def _forget_saved(self, params: Iterable[int]) -> None:
        """Their backward has run: autograd lets go of the saved parameters."""
        for param in params:
            self.stream.free(*self.saved.pop(param, ()))

    # micro-batch ---------------------------------------------------------------------------------------------------
    def begin_micro_batch(self, last: bool) -> None:
        super().begin_micro_batch(last)
        self.stream.free(*self.packed.begin_micro_batch())

    def backward_begin(self) -> None:
        self.stream.free(*self.packed.begin_backward())

    def zero_grad(self) -> None:
        self.stream.free(*self.packed.end_step())

    def forward_begin(self) -> None:
        self.coordinator.reset_step()

    def enter(self, module: int, recompute: bool) -> None:
        if self.hooked[module]:
            self.coordinator.fetch(module, True, recompute)

    def exit(self, module: int, recompute: bool) -> None:
        if self.hooked[module]:
            self.packed.ran(module, self.gathered)
            self.recomputing = recompute and self.packed.kept_to_backward(module)
            self.coordinator.release(module, True)
            self.recomputing = False

    def backward_enter(self, module: int) -> None:
        if self.hooked[module]:
            self.coordinator.fetch(module, False, False)

    def backward_exit(self, module: int) -> None:
        if self.hooked[module]:
            self._forget_saved(self.params_of[module])
            self.coordinator.release(module, False)
            self._leave_leaf(module)

    def grad(self, param: int, handle: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads. Gradients inside a leaf module wait for its backward to end. Linear layers run
        zero/linear.py:LinearFunctionForZeroStage3, which hands over the weight's gradient first; torch's own, the bias's."""
        self._forget_saved((param,))
        leaf, weight = self.leaf_params.get(param), self.weight_of.get(param, -1)
        if leaf is not None:
            self.held_in_leaf.setdefault(leaf, []).append((param, handle))
        elif weight >= 0 and weight not in self.seen:
            self.held_bias[weight] = (param, handle)
        else:
            self.seen.add(param)
            self._to_bucket(param, handle)
            bias = self.held_bias.pop(param, None)
            if bias is not None:
                self._to_bucket(*bias)

    def _leave_leaf(self, module: int) -> None:
        for param, handle in sorted(self.held_in_leaf.pop(module, [])):
            self._to_bucket(param, handle)

    def _to_bucket(self, param: int, handle: int) -> None:
        n, size, bucket = self.numel[param], self.zero.reduce_bucket_size, self.buckets[self.comm_of[param]]
        if bucket.grads and bucket.filled + n > size:
            self._reduce(bucket)
        copied = self.zero.contiguous_gradients and bucket.filled + n <= size
        bucket.grads.append((param, 0 if copied else handle))
        bucket.filled += n
        if copied:
            self.stream.free(handle)

    def backward_end(self) -> None:
        """independent_gradient_partition_epilogue, release_backward_leftovers."""
        for module in list(self.held_in_leaf):
            self._leave_leaf(module)
        self._forget_saved(list(self.saved))
        for bias in self.held_bias.values():
            self._to_bucket(*bias)
        self.held_bias, self.seen = {}, set()
        for bucket in self.buckets.values():
            self._reduce(bucket)
        self.coordinator.release_leftovers()

    # reduction -----------------------------------------------------------------------------------------------------
    def _reduce(self, bucket: Bucket) -> None:
        """__reduce_and_partition_ipg_grads."""
        if not bucket.grads:
            return
        zero = self.zero
        if zero.contiguous_gradients and bucket.filled <= zero.reduce_bucket_size and not zero.reduce_scatter:
            held = self._allreduce_bucket(bucket)
        else:
            held = self._reduce_scatter(bucket)
            bucket.grads.sort()  # by ds_id (__reduce_and_partition_ipg_grads): partition_grads then frees them one by one
        for param, handle in bucket.grads:
            if self.offload:
                self._to_host(param)
            self.stream.free(handle)
        self.stream.free(*held)
        bucket.grads, bucket.filled = [], 0

    def _reduce_scatter(self, bucket: Bucket) -> list[int]:
        """__avg_scatter_grads with comm/coalesced_collectives.py:reduce_scatter_coalesced: chunks of all gradients, padded, in one copy;
        a single gradient that divides evenly is reduced in place."""
        stream, comm = self.stream, dtype_bytes(bucket.dtype)
        params = sorted(p for p, _ in bucket.grads)
        casts = []
        if bucket.dtype != self.trained:
            casts = [stream.alloc(self.numel[p] * comm, Category.COMMUNICATION, "reduce copy", self.side)
                     for p, own in bucket.grads if own]  # fmt: skip
        flat = 0
        if len(params) > 1 or self.numel[params[0]] % self.world:
            pads = [stream.alloc((self._padded(p) - self.numel[p]) * comm, Category.COMMUNICATION, "reduce copy", self.side)
                    for p in params]  # fmt: skip
            nbytes = sum(self._padded(p) for p in params) * comm
            flat = stream.alloc(nbytes, Category.COMMUNICATION, "reduce copy", self.side)
            stream.free(*pads)
        if bucket.dtype == self.acc_dtype:
            stream.free(*casts)
            return [flat]
        parts = [stream.alloc(self.q[p] * self.acc, Category.GRADIENTS, "averaged gradients", self.side) for p in params]
        stream.free(flat, *casts)
        return parts

    def _allreduce_bucket(self, bucket: Bucket) -> list[int]:
        """__avg_scatter_contiguous_grads: in place, but the product with gradient_predivide_factor is a new tensor."""
        stream, comm = self.stream, dtype_bytes(bucket.dtype)
        copy = stream.alloc(bucket.filled * comm if self.world > 1 else 0, Category.COMMUNICATION, "reduce copy", self.side)
        if bucket.dtype != self.acc_dtype:
            cast = stream.alloc(bucket.filled * self.acc, Category.COMMUNICATION, "reduce copy", self.side)
            stream.free(copy)
            copy = cast
        padded = [stream.alloc(self.q[p] * self.acc, Category.GRADIENTS, "averaged gradients", self.side)
                  for p, _ in bucket.grads if self._owned(p) != self.q[p]]  # fmt: skip
        return [copy, *padded]

    def _owned(self, param: int) -> int:
        """Elements of this rank's partition that are not padding."""
        return max(0, min(self.numel[param] - self.rank * self.q[param], self.q[param]))

    def _to_host(self, param: int) -> None:
        """partition_grads with offload: the accumulated partition comes back to the device, where the norm is taken at the boundary."""
        n = self._owned(param)
        if not n:
            return
        stream = self.stream
        back = stream.alloc(n * self.acc, Category.GRADIENTS, "gradients on their way to the host", self.side)
        if self.boundary:
            stream.touch(min(n, _NORM_CHUNK) * NORM_BYTES, Category.TEMPORARIES, "gradient norm", self.side)
            if self.acc_dtype != self.master_dtype:
                stream.touch(n * self.master, Category.GRADIENTS, "gradients on their way to the host", self.side)
        stream.free(back)

    # step ----------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        self.coordinator.release_all()
        if self.trained == "float16" and not self.offload:
            self._check_overflow()
        if not self.offload:
            for s in self.subgroups:
                self.norms([self.q[i] for i in s], NORM_BYTES)
        for k in self.device_groups:
            self._step_subgroup(k)
        if self.offload:
            self.host_moments([self.sizes[k] for k in self.host_groups])
        self.mark_host("step_1" if len(self.host_phases) < 2 else "step_2")
        self._gather_persistent()

    def _check_overflow(self) -> None:
        """has_overflow: isinf of the whole buffer is abs() and a mask, isnan a mask."""
        total = sum(self.sizes)
        copy = self.stream.alloc(total * self.acc, Category.TEMPORARIES, "overflow check")
        self.stream.touch(total, Category.TEMPORARIES, "overflow check")
        self.stream.free(copy)
        self.stream.touch(total, Category.TEMPORARIES, "overflow check")

    def _step_subgroup(self, k: int) -> None:
        stream, size = self.stream, self.sizes[k]
        flat = cast = 0
        if not self.offload:
            flat = stream.alloc(size * self.acc if len(self.subgroups[k]) > 1 else 0, Category.GRADIENTS, "flat gradient partition")
            if self.acc_dtype != self.master_dtype:
                cast = stream.alloc(size * self.master, Category.GRADIENTS, "fp32 gradient partition")
                stream.free(flat)
        self.optimizers[k].step()
        stream.free(cast or flat)

    def save(self, spec: SavingSpec) -> None:
        """_zero3_consolidated_16bit_state_dict: everything is partitioned, then each module's own parameters are whole on every rank while
        rank 0 copies them to its host; afterwards the persistent ones are gathered again (engine.py, stage3.py:checkpoint_event_prologue,
        checkpoint_event_epilogue). Without the 16-bit weights ranks write their own partitions."""
        if self.zero.stage3_gather_16bit_weights_on_model_save:
            self.gather_state_dict("rank 0")

    def gather_state_dict(self, where: str) -> None:
        """The consolidated 16-bit weights of `save`; on the device: GatheredParameters over all parameters (partition_parameters.py),
        whole on every rank until its block ends. float32 weights come from files."""
        if where == "device":
            self.release_whole(self.whole_model())
        elif where == "rank 0":
            self._partition_all()
            for params in self._params_by_module():
                self.stream.free(*self._whole(params))
            self._gather_persistent()

    def whole_model(self) -> list[int]:
        """GatheredParameters over all parameters."""
        self._partition_all()
        return [handle for params in self._params_by_module() for handle in self._whole(params)]

    def release_whole(self, handles: Sequence[int]) -> None:
        super().release_whole(handles)
        self._gather_persistent()

    def _partition_all(self) -> None:
        self.coordinator.release_all()
        for i in [i for i in self.gathered if self.persistent[i]]:
            self.stream.free(self.gathered.pop(i))

    def _whole(self, params: Sequence[int]) -> list[int]:
        return [self.stream.alloc(self._padded(i) * self.bytes[i], Category.COMMUNICATION, "gathered state dict") for i in params]

    def synced_tensors(self) -> list[int]:
        """GatheredParameters of one parameter after the other (trl 1.16 generation/vllm_generation.py)."""
        return [self._padded(i) * self.bytes[i] for i in range(len(self.trace.params))]

    def _params_by_module(self) -> list[list[int]]:
        own: dict[int, list[int]] = {}
        for i, p in enumerate(self.trace.params):
            own.setdefault(p.module, []).append(i)
        return [own[m] for m in sorted(own)]

    def _gather_persistent(self) -> None:
        """_post_step: parameters below the persistence threshold are whole until the next step; hpZ's copies are stale."""
        stream, offloaded = self.stream, []
        for i, persistent in enumerate(self.persistent):
            if persistent:
                if self.offload_param:
                    offloaded.append(stream.alloc(self.q[i] * self.bytes[i], Category.COMMUNICATION, "all-gather"))
                self.gathered[i] = stream.alloc(self._padded(i) * self.bytes[i], Category.PARAMETERS, "persistent parameters")
                self.coordinator.status[i] = AVAILABLE
        stream.free(*offloaded)
        for i in [i for i in self.secondary if self.trace.params[i].requires_grad]:
            stream.free(self.secondary.pop(i))
