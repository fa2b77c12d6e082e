"""The optimizer's own memory: its states, when they appear, and what one step() holds beside them.

Source: torch 2.13 torch/optim (_init_group creates states of one group, _multi_tensor_* its temporaries, group by group); the tables are
profiles/optimizers/*.yaml, tested against the real classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launchguard.events import Category
from launchguard.job import TRAINER_LOOPS, OptimizerSpec
from launchguard.profiles import optimizer, state_bytes, temporary_bytes
from launchguard.strategies._stream import Stream
from launchguard.units import ceil_div, dtype_bytes

NORM_CHUNK, SCALAR_BYTES = 65536, 4
PARTIAL_SUMS = "partial sums of gradient norms"


class SteppedTensor(NamedTuple):
    """One tensor that the optimizer updates. full_precision: its states are kept unquantised (nn.Embedding under the HF Trainer,
    transformers 5.24 trainer_optimizer.py: GlobalOptimManager override)."""

    shape: tuple[int, ...]
    dtype: str
    full_precision: bool = False


def parameter_groups(tensors: list[SteppedTensor], loop: str) -> list[list[SteppedTensor]]:
    """The HF Trainer keeps biases and norms in a group of their own (transformers 5.24 trainer.py:create_optimizer)."""
    if loop not in TRAINER_LOOPS:
        return [tensors]
    return [[t for t in tensors if len(t.shape) > 1], [t for t in tensors if len(t.shape) <= 1]]


class OptimizerStates:
    """States and step temporaries of one optimizer over the tensors that it updates on this rank, in parameter groups."""

    def __init__(self, stream: Stream, spec: OptimizerSpec, groups: Sequence[Sequence[SteppedTensor]], on_device: bool = True) -> None:
        self.stream, self.spec, self.groups, self.on_device = stream, spec, [list(g) for g in groups if g], on_device
        self.profile = optimizer(spec.name)
        self.created = False
        self.handles: list[int] = []
        if self.profile.created == "construction":
            for group in self.groups:
                self._create(group)
            self.created = True

    def _create(self, group: Sequence[SteppedTensor]) -> None:
        if not self.on_device:
            return
        for tensor in group:
            for name, nbytes in self._states(SteppedTensor(*tensor)):
                self.handles.append(self.stream.alloc(nbytes, Category.OPTIMIZER_STATES, name))

    def load_state_dict(self) -> None:
        """States of a checkpoint come to the device tensor by tensor; those that are there go when all have come (torch 2.13
        optim/optimizer.py:load_state_dict builds a new dict of states)."""
        old, self.handles = self.handles, []
        for group in self.groups:
            self._create(group)
        self.stream.free(*old)
        self.created = True

    def _states(self, tensor: SteppedTensor) -> list[tuple[str, int]]:
        how, quantized = self.spec.implementation, not tensor.full_precision
        return state_bytes(self.profile, tensor.shape, tensor.dtype, self.spec.params, implementation=how, quantized=quantized)

    def step(self) -> None:
        for group in self.groups:
            if not self.created:
                self._create(group)
            self._temporaries(group)
        self.created = True

    def _temporaries(self, group: Sequence[SteppedTensor]) -> None:
        if not self.on_device:
            return
        sizes = [numel(t[0]) * dtype_bytes(t[1]) for t in group]
        total, largest = sum(sizes), max(sizes)
        nbytes = temporary_bytes(self.profile, self.spec.implementation, total, largest, self.spec.params, dtype=group[0][1])
        if total and nbytes >= total:  # foreach: a list of tensors like the parameters, as many times as it takes
            held = [self.stream.alloc(n * nbytes // total, Category.TEMPORARIES, "optimizer step (foreach)") for n in sizes]
        else:
            held = [self.stream.alloc(nbytes, Category.TEMPORARIES, "optimizer step")]
        self.stream.free(*held)

    def state_bytes_total(self) -> int:
        """Bytes of all states, wherever they live; for host accounting under offload."""
        return sum(n for group in self.groups for tensor in group for _, n in self._states(SteppedTensor(*tensor)))


def numel(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def clip_grad_norm(stream: Stream, numels: Sequence[int], foreach: bool = True) -> None:
    """torch.nn.utils.clip_grad_norm_ over gradients of these sizes, scalar by scalar (torch 2.13 nn/utils/clip_grad.py:_get_total_norm,
    _clip_grads_with_norm_). foreach: one kernel with a partial sum for every 65536 elements of the largest gradient, of each of them
    (aten/src/ATen/native/cuda/ForeachReduceOp.cu:foreach_tensor_norm_cuda; to the byte on a virtual card)."""
    norms = [_scalars(stream, 1) for _ in numels]
    if foreach:
        chunks = max((ceil_div(n, NORM_CHUNK) for n in numels), default=0)
        stream.touch(len(numels) * chunks * SCALAR_BYTES, Category.TEMPORARIES, PARTIAL_SUMS)
    stack, total = _scalars(stream, len(numels)), _scalars(stream, 1)
    stream.free(stack, *norms)
    stream.free(total, *[_scalars(stream, 1) for _ in range(3)])  # max_norm / (total + 1e-6): sum, reciprocal, product


def _scalars(stream: Stream, count: int) -> int:
    return stream.alloc(count * SCALAR_BYTES, Category.TEMPORARIES, "gradient norms")
