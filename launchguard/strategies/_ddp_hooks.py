"""Communication hooks of DDP: what each holds beside the buckets (torch 2.13 torch/distributed/algorithms/ddp_comm_hooks).

A bucket's hook is called when all its gradients are there and the buckets before it were called (reducer.cpp:mark_bucket_ready).
"""

from __future__ import annotations

from collections.abc import Sequence

from launchguard.events import Category, ParamInfo
from launchguard.strategies._stream import Stream
from launchguard.units import dtype_bytes

HOOKS = ("fp16", "bf16", "power_sgd")  # names as in Accelerate's DDPCommunicationHookType
MIN_COMPRESSION_RATE, RANK = 2, 1  # powerSGD_hook.py:PowerSGDState, defaults


class CommHook:
    """No hook: buckets are reduced in place. first: the step in which it begins, from 0."""

    first = 0

    def __init__(self, stream: Stream, params: Sequence[ParamInfo]) -> None:
        self.stream, self.params = stream, params
        self.members: list[list[int]] = []
        self.waiting: list[set[int]] = []  # gradients that are still to come, by bucket
        self.next = self.iteration = 0

    def buckets(self, members: list[list[int]]) -> None:
        self.members = members
        self.waiting = [set(bucket) for bucket in members]

    def ready(self, param: int) -> None:
        for waiting in self.waiting:
            waiting.discard(param)
        while self.next < len(self.waiting) and not self.waiting[self.next]:
            self.reduce(self.next)
            self.next += 1

    def finish(self) -> None:
        """The end of a synchronised backward: what was never used is reduced as well."""
        for index in range(self.next, len(self.members)):
            self.reduce(index)
        self.next, self.iteration = 0, self.iteration + 1
        self.waiting = [set(bucket) for bucket in self.members]

    def reduce(self, index: int) -> None: ...

    def nbytes(self, index: int) -> int:
        return sum(p.numel * dtype_bytes(p.dtype) for p in (self.params[i] for i in self.members[index]))


class Compressed(CommHook):
    """default_hooks.py:_compress_hook: a copy of the bucket in half precision. It is held until the next collective (ProcessGroupNCCL.cpp:
    stashed_for_allocator_safety_, unstashed by workEnqueue), here to the end of backward at the latest."""

    def __init__(self, stream: Stream, params: Sequence[ParamInfo], dtype: str) -> None:
        super().__init__(stream, params)
        self.dtype, self.in_flight = dtype, 0

    def reduce(self, index: int) -> None:
        members = [self.params[i] for i in self.members[index]]
        copied = 0 if members[0].dtype == self.dtype else sum(p.numel for p in members) * dtype_bytes(self.dtype)
        compressed = self.stream.alloc(copied, Category.COMMUNICATION, "gradients compressed for all-reduce")
        self.stream.free(self.in_flight)
        self.in_flight = compressed

    def finish(self) -> None:
        super().finish()
        self.stream.free(self.in_flight)
        self.in_flight = 0


class PowerSgd(CommHook):
    """powerSGD_hook.py:powerSGD_hook with its defaults. It begins after start_powerSGD_iter steps (1000), here as soon as buckets are made
    anew no more (`first`: in the second step, a static graph's in the third): a job that gets there needs room for it."""

    def __init__(self, stream: Stream, params: Sequence[ParamInfo], first: int) -> None:
        super().__init__(stream, params)
        self.first = first
        self.errors: dict[int, int] = {}

    def reduce(self, index: int) -> None:
        if self.iteration < self.first:
            return
        stream, nbytes = self.stream, self.nbytes(index)
        fresh = index not in self.errors
        if fresh:
            self.errors[index] = stream.alloc(nbytes, Category.COMMUNICATION, "PowerSGD errors")
        copy = stream.alloc(nbytes, Category.COMMUNICATION, "PowerSGD copy of the bucket")
        plain, low_rank = self._split(index)
        whole = stream.alloc(plain, Category.COMMUNICATION, "gradients that PowerSGD leaves whole")
        if fresh:
            for part in low_rank:
                stream.alloc(part, Category.COMMUNICATION, "PowerSGD factors")
        error = stream.alloc(nbytes, Category.COMMUNICATION, "PowerSGD errors")
        stream.free(self.errors[index], copy, whole)
        self.errors[index] = error

    def _split(self, index: int) -> tuple[int, tuple[int, int]]:
        """Bytes that are reduced as they are, and of the factors P and Q (powerSGD_hook.py:_should_compress)."""
        plain = rows = columns = 0
        for p in (self.params[i] for i in self.members[index]):
            n = p.shape[0] if p.shape else 1
            m, size = p.numel // max(n, 1), dtype_bytes(p.dtype)
            rank = min(n, m, RANK)
            if (n + m) * rank * MIN_COMPRESSION_RATE < n * m:
                rows, columns = rows + n * rank * size, columns + m * rank * size
            else:
                plain += p.numel * size
        return plain, (rows, columns)


def hook_of(name: str | None, stream: Stream, params: Sequence[ParamInfo], static_graph: bool) -> CommHook:
    if name in ("fp16", "bf16"):
        return Compressed(stream, params, "float16" if name == "fp16" else "bfloat16")
    return PowerSgd(stream, params, first=2 if static_graph else 1) if name == "power_sgd" else CommHook(stream, params)
