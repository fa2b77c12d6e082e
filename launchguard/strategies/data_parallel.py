"""torch nn.DataParallel: one process, every card a "rank" here. The first card holds the model, the optimizer and the gathered outputs; the
others hold a replica from forward to backward. The Trainer wraps in it when one process sees several GPUs (transformers 5.24
trainer.py:_wrap_model).

Read in torch 2.13 torch/nn/parallel (data_parallel.py, replicate.py, scatter_gather.py, _functions.py, comm.py:reduce_add_coalesced) and
csrc/cuda/comm.cpp (broadcast_coalesced, scatter, gather), with NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launchguard.events import Category, RankSchedule, StepTrace, TraceOp
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import Engine, schedule_of
from launchguard.strategies.single import SingleEngine
from launchguard.units import MIB

BUFFER_BYTES = 10 * MIB  # comm.py: broadcast_coalesced and reduce_add_coalesced, buffer_size


def groups_of(sizes: Sequence[tuple[str, int]], closes_before: bool) -> list[list[int]]:
    """Tensors (dtype, bytes) that travel as one, by dtype. utils/tensor_flatten.cpp:take_tensors closes a group that has reached the size;
    torch/_utils.py:_take_tensors closes it before a tensor that would exceed it."""
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for i, (dtype, nbytes) in enumerate(sizes):
        if closes_before and filled.get(dtype, 0) + nbytes > BUFFER_BYTES and filling.get(dtype):
            closed.append(filling.pop(dtype))
            filled[dtype] = 0
        filling.setdefault(dtype, []).append(i)
        filled[dtype] = filled.get(dtype, 0) + nbytes
        if not closes_before and filled[dtype] >= BUFFER_BYTES:
            closed.append(filling.pop(dtype))
            filled[dtype] = 0
    return closed + list(filling.values())


class Card(Engine):
    """What all cards share: parameters are broadcast before forward, gradients of all replicas are reduced at the end of backward."""

    def plan(self) -> None:
        """Parameters of each broadcast and of each reduction, with their bytes."""
        params = self.trace.params
        self.sizes = [self.stored_bytes(i) for i in range(len(params))]
        typed = [(p.dtype, n) for p, n in zip(params, self.sizes)]
        self.broadcasts, self.reductions = groups_of(typed, closes_before=False), groups_of(typed, closes_before=True)
        self.arrived: dict[int, int] = {}  # gradients of this card's replica

    def bytes_of(self, group: Sequence[int]) -> int:
        return sum(self.sizes[i] for i in group)

    def grad(self, param: int, handle: int) -> None:
        """Broadcast.backward waits for the gradients of all replicas."""
        self.arrived[param] = handle

    def reduce(self) -> Iterator[int]:
        """reduce_add_coalesced: each group is flattened (alone, a tensor is its own flat one) while the flat tensor of the last is still a
        variable; gives each group when its flat tensor is there. Function.backward gets zeros for what needs no gradient."""
        zeros = [self.stream.alloc(n, Category.GRADIENTS, "zeros for frozen parameters")
                 for i, n in enumerate(self.sizes) if i not in self.arrived]  # fmt: skip
        flat = 0
        for k, group in enumerate(self.reductions):
            last, flat = flat, self.stream.alloc(self.bytes_of(group) if len(group) > 1 else 0, Category.COMMUNICATION, "flat gradients")
            self.stream.free(last)
            yield k
        self.stream.free(flat, *self.arrived.values(), *zeros)
        self.arrived = {}


class FirstCard(Card, SingleEngine):
    """Model, optimizer, whole batches, gathered outputs and summed gradients."""

    def load(self) -> None:
        super().load()
        self.plan()
        self.batch_share = self.job.cards
        self.gathered: list[int] = []

    def forward_begin(self) -> None:
        for group in self.broadcasts:
            self.stream.touch(self.bytes_of(group) if len(group) > 1 else 0, Category.COMMUNICATION, "parameter broadcast")

    def returned(self, outputs: Mapping[int, int]) -> Mapping[int, int]:
        """gather: every output of all replicas on the first card."""
        sizes = [n * self.job.cards for s, n in self.trace.outputs if s in outputs]
        self.gathered = [self.stream.alloc(n, Category.ACTIVATIONS, "gathered outputs") for n in sizes]
        return {}

    def forward_end(self) -> None:
        if not self.job.outputs_alive_in_backward:
            self._drop_outputs()

    def _drop_outputs(self) -> None:
        self.stream.free(*self.gathered)
        self.gathered = []

    def backward_end(self) -> None:
        """A parameter's .grad is a view of its group's sum, or is added to."""
        sums = {}
        for k in self.reduce():
            sums[k] = self.stream.alloc(self.bytes_of(self.reductions[k]), Category.GRADIENTS, "gradients")
        for k, handle in sums.items():
            if k in self.grads or not any(self.trace.params[i].requires_grad for i in self.reductions[k]):
                self.stream.free(handle)
            else:
                self.grads[k] = handle
        self._drop_outputs()


class ReplicaCard(Card):
    """One of the others: a replica, its share of the batch, its gradients. The replica itself is dropped after forward; what backward needs
    of it keeps the flat tensors that its parameters are views of."""

    def load(self) -> None:
        self.plan()
        self.batch_share = 0
        self.replica: dict[int, int] = {}
        self.needed = [set(group) & self._saved() for group in self.broadcasts]
        self.waiting: list[set[int]] = []
        self.heads = {i for i, is_head in self._tables() if is_head}  # the first of backward

    def _tables(self) -> Iterator[tuple[int, bool]]:
        """Parameters of embeddings, of which autograd needs the indices only; is it a head's, too, which it does save?"""
        for i, p in enumerate(self.trace.params):
            is_table = [self.trace.modules[m].cls == "Embedding" for m in p.owners]
            if any(is_table):
                yield i, not all(is_table)

    def _saved(self) -> set[int]:
        """Parameters that autograd saves: those that a gradient has to pass."""
        order = [e.a for e in self.trace.events if e.op is TraceOp.ENTER]
        first = {m: k for k, m in reversed([*enumerate(order)])}
        runs = [min(first.get(m, 0) for m in p.owners) for p in self.trace.params]
        start = min(runs[i] for i in self.trainable)
        tables = dict(self._tables())
        return {i for i, run in enumerate(runs) if tables.get(i, run > start)}

    def forward_begin(self) -> None:
        self.replica = {
            k: self.stream.alloc(self.bytes_of(group), Category.PARAMETERS, "replica") for k, group in enumerate(self.broadcasts)
        }
        self.buffers = [self.stream.alloc(n, Category.PARAMETERS, "buffers") for n in self.trace.buffer_bytes]

    def forward_end(self) -> None:
        self.stream.free(*self.buffers)
        self.waiting = [set(group) for group in self.needed]
        self._release()

    def grad(self, param: int, handle: int) -> None:
        super().grad(param, handle)
        for group in self.waiting:
            group -= {param, *self.heads}
        self._release()

    def _release(self) -> None:
        for k, group in enumerate(self.waiting):
            if not group:
                self.stream.free(self.replica.pop(k, 0))

    def backward_end(self) -> None:
        self.stream.free(*self.replica.values())
        self.replica = {}
        for _ in self.reduce():
            pass


def representatives(job: JobSpec, trace: StepTrace) -> list[tuple[int, ...]]:
    """The first card, and all others."""
    return [(0,), tuple(range(1, job.cards))][: job.cards]


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    card = FirstCard if ranks[0] == 0 else ReplicaCard
    return schedule_of(card(job, trace, ranks[0], device), ranks)
