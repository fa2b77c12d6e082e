"""torch DistributedDataParallel: the single-device picture plus flat gradient buckets.

Read in torch 2.13 torch/nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp; measured with 2 ranks: the buckets total all
trainable gradients and live from construction to the end; `.grad` is a separate tensor unless gradient_as_bucket_view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.job import DdpSpec, JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._ddp_hooks import hook_of
from launchguard.strategies._loop import broadcast_coalesced, schedule_of
from launchguard.strategies._stream import MicroBatchHooks, kept_by_autograd
from launchguard.strategies.single import SingleEngine, representatives
from launchguard.units import MIB, dtype_bytes

__all__ = ["DdpEngine", "representatives", "schedule"]

FIRST_BUCKET_BYTES = 1 * MIB  # distributed.py: _DEFAULT_FIRST_BUCKET_BYTES, before bucket_cap_mb takes over
BUCKET_BYTES = 25 * MIB


class DdpEngine(SingleEngine):
    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        super().__init__(job, trace, rank, device)
        self.buckets: list[int] = []
        self.ready: list[int] = []  # parameters in the order in which their gradients arrived
        self.views: set[int] = set()  # parameters whose .grad looks into a bucket
        self.sync, self.synced = True, False  # in this micro-batch; ever
        self.searches_unused = self.spec.find_unused_parameters and not self.spec.static_graph
        self.rebuilt = self.searches_unused  # then buckets are never rebuilt
        self.needed = kept_by_autograd(trace)
        self.hook = hook_of(self.spec.comm_hook, self.stream, trace.params, self.spec.static_graph)
        self.ran_backward = False
        self.steps = max(self.steps, self.hook.first + 2)  # one with what the hook keeps of the one before

    @property
    def spec(self) -> DdpSpec:
        return self.job.ddp or DdpSpec()

    def prepare(self) -> None:
        broadcast_coalesced(self.stream, [self.stored_bytes(i) for i in range(len(self.trace.params))])
        self._allocate_buckets(self.assign(self.trainable, capped=self.searches_unused)[::-1])  # compute_bucket_size_limits
        if self.spec.find_unused_parameters or self.spec.static_graph:  # reducer.cpp:initialize_local_used_map; its twin is on the host
            self.stream.alloc(dtype_bytes("int32") * len(self.trainable), Category.COMMUNICATION, "which parameters were used")
        super().prepare()

    def _allocate_buckets(self, members: list[list[int]]) -> None:
        self.stream.free(*self.buckets)
        self.hook.buckets(members)
        self.buckets = [self.stream.alloc(self.hook.nbytes(k), Category.GRADIENTS, "DDP buckets") for k in range(len(members))]

    def assign(self, order: Sequence[int], capped: bool = True) -> list[list[int]]:
        """Parameters by bucket: per dtype, closed when the cap is reached (reducer.cpp:compute_bucket_assignment_by_size)."""
        closed: list[list[int]] = []
        filling: dict[str, list[int]] = {}
        filled: dict[str, int] = {}
        caps: dict[str, int] = {}  # of each dtype's next bucket
        for i in order:
            p = self.trace.params[i]
            filling.setdefault(p.dtype, []).append(i)
            filled[p.dtype] = filled.get(p.dtype, 0) + p.numel * dtype_bytes(p.dtype)
            if capped and filled[p.dtype] >= caps.get(p.dtype, FIRST_BUCKET_BYTES):
                closed.append(filling.pop(p.dtype))
                filled[p.dtype], caps[p.dtype] = 0, BUCKET_BYTES
        return closed + list(filling.values())

    def forward_begin(self) -> None:
        """Before the forward that follows the first synchronised backward (a static graph's second) the buckets are made anew in the order
        in which gradients became ready (Reducer::rebuild_buckets)."""
        if self.ready and not self.rebuilt:
            self.rebuilt = True
            self._allocate_buckets(self.assign(self.ready))

    def returned(self, outputs: Mapping[int, int]) -> Mapping[int, int]:
        """find_unused_parameters, and a static graph's first forward: outputs pass through _DDPSink, which clones them; the originals
        live on where backward needs them (distributed.py:_post_forward, _DDPSink.forward)."""
        if not self.searches_unused and not (self.spec.static_graph and not self.ran_backward):
            return {}
        clones = [(s, self.stream.alloc(n, Category.ACTIVATIONS, "outputs cloned by DDP")) for s, n in self.trace.outputs if s in outputs]
        successors = {s: clone for s, clone in clones if s not in self.needed}
        self.stream.free(*[outputs[s] for s in successors])
        self.stream.free(*[clone for s, clone in clones if successors.get(s) != clone])
        return successors

    def begin_micro_batch(self, last: bool) -> None:
        self.sync = last

    def grad(self, param: int, handle: int) -> None:
        """gradient_as_bucket_view: at the end of a synchronised backward .grad is a view of its bucket. What no_sync leaves, and all of the
        first backward of a static graph, are tensors of their own until then (reducer.cpp:mark_variable_ready_dense, delay_all_reduce)."""
        delayed = self.spec.static_graph and not self.synced
        if self.sync and not delayed and not self.rebuilt and len(self.ready) < len(self.trainable):  # reducer.cpp:autograd_hook
            self.ready.append(param)
        if self.spec.gradient_as_bucket_view and self.sync and not delayed and param not in self.views:
            self._copy_into_bucket(param)
            arrived = handle
        elif param in self.views or param in self.grads:
            arrived = handle  # accumulated in place
        else:
            self.grads[param] = handle
            arrived = 0
        if self.sync and not delayed:
            self.hook.ready(param)
        self.stream.free(arrived)  # autograd holds what arrived until the hooks have run

    def _copy_into_bucket(self, param: int) -> None:
        self.stream.free(self.grads.pop(param, 0))
        self.views.add(param)

    def backward_end(self) -> None:
        if self.sync and self.spec.gradient_as_bucket_view:
            for param in list(self.grads):
                self._copy_into_bucket(param)
        if self.sync:
            self.hook.finish()
        self.synced, self.ran_backward = self.synced or self.sync, True

    def evaluation_hooks(self) -> MicroBatchHooks:
        """The Trainer evaluates the module inside DDP (transformers 5.24 trainer.py:_wrap_model, training=False)."""
        return MicroBatchHooks()

    def zero_grad(self) -> None:
        super().zero_grad()
        if self.job.zero_grad_set_to_none:
            self.views.clear()


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    return schedule_of(DdpEngine(job, trace, ranks[0], device), ranks)
