"""What flows between the rooms: a traced micro-batch, the schedule of one rank, and what the allocator made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple


class Category(str, Enum):
    """Whose bytes they are; the keys of the report's breakdown."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication"
    TEMPORARIES = "temporaries"
    OVERHEAD = "overhead"


# ---------------------------------------------------------------- one traced micro-batch
class TraceOp(IntEnum):
    ALLOC = 0  # a: storage, b: bytes
    FREE = 1  # a: storage
    ENTER = 2  # a: module, b: storage of its first tensor input (0: none on the device); also when it is recomputed inside backward
    EXIT = 3  # a: module; its forward ended
    BACKWARD_ENTER = 4  # a: module; the first gradient of its outputs is ready
    BACKWARD_EXIT = 5  # a: module; the gradients of its inputs are ready (never fires if no input needs one)
    GRAD = 6  # a: parameter, b: storage that holds its gradient; autograd has just accumulated it
    FORWARD = 7  # forward and loss begin
    BACKWARD = 8  # backward begins
    END = 9  # backward ended
    MATMUL = 10  # the first matrix product of forward or backward: its thread's cuBLAS workspace appears


class TraceEvent(NamedTuple):
    op: TraceOp
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, once (tied names share one entry).

    name: first fully qualified name; shape: full shape; dtype: as traced (compute dtype); module: index of the
    module that owns it directly; owners: every module that holds it (more than one when tied).
    storage_bytes: bytes as stored where numel * itemsize is not it (quantised weights), else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    module: int
    owners: tuple[int, ...]
    storage_bytes: int | None = None

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class ModuleInfo:
    """name: fully qualified ("" for the root), cls: class name, parent: index, -1 for the root."""

    name: str
    cls: str
    parent: int


class Prediction(NamedTuple):
    """A tensor that an evaluation keeps of one batch. storage: in the trace; nbytes: of the tensor itself."""

    storage: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class StepTrace:
    """Allocations of one micro-batch (forward, loss, backward) of the plain module, in host order.

    Parameters and buffers are not among the events; a gradient is allocated in the stream, handed over by GRAD, and
    freed right behind it: who keeps gradients, and how long, is a strategy's business.
    """

    params: tuple[ParamInfo, ...]
    modules: tuple[ModuleInfo, ...]
    buffer_bytes: tuple[int, ...]
    events: tuple[TraceEvent, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # no_split_modules, attention kernels, value reads, seconds
    inputs: tuple[int, ...] = ()  # storages of the micro-batch itself
    outputs: tuple[tuple[int, int], ...] = ()  # tensors that the model returned: storage, bytes
    predictions: tuple[Prediction, ...] = ()  # of an evaluation batch: what the model returned beside the loss
    evaluation: StepTrace | None = None  # one evaluation batch: forward alone, no gradients
    first: StepTrace | None = None  # the job's first micro-batch, where it differs from later ones


# ---------------------------------------------------------------- the schedule of one rank
class Op(IntEnum):
    ALLOC = 0  # handle, nbytes, category, label, stream
    FREE = 1  # handle
    PHASE = 2  # label: the name of the phase that begins
    MODULE = 3  # label: where we are; what the report names beside the phase
    EMPTY_CACHE = 4  # wholly free segments go back to the driver


class MemoryEvent(NamedTuple):
    """One thing that a rank's process asks of the device allocator. label: whose allocation, phase or module it is."""

    op: Op
    handle: int = 0
    nbytes: int = 0
    category: Category = Category.OVERHEAD
    label: str = ""
    stream: int = 0


@dataclass(frozen=True)
class HostPhase:
    """Bytes of host memory that one process holds at the peak of a phase, by label."""

    name: str
    bytes_by_label: Mapping[str, int]


@dataclass(frozen=True)
class RankSchedule:
    """Everything one rank allocates. ranks: all global ranks that behave alike; the first one was simulated."""

    ranks: tuple[int, ...]
    events: tuple[MemoryEvent, ...]
    host: tuple[HostPhase, ...] = ()


# ---------------------------------------------------------------- what the allocator made of it
@dataclass(frozen=True)
class PhasePeak:
    """Peaks within one phase (a name that comes twice is one phase). module: where the allocated peak was reached."""

    name: str
    module: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """The allocation that failed, as torch would print it."""

    phase: str
    module: str
    label: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The replay of one schedule.

    allocated_bytes, reserved_bytes: peaks of the whole run (each its own maximum); phase, module: where allocated peaked;
    live: (category, label) -> bytes alive at the allocated peak, sums to allocated_bytes; oom: None if it never failed;
    retries: times the cache was given back to the driver to make room.
    """

    phases: tuple[PhasePeak, ...]
    allocated_bytes: int
    reserved_bytes: int
    phase: str
    module: str
    live: Mapping[tuple[Category, str], int]
    oom: OutOfMemory | None = None
    retries: int = 0
