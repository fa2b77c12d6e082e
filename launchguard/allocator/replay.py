"""The replay of a schedule: what the allocator makes of one rank's events, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launchguard.allocator.caching_allocator import Block, CachingAllocator, Driver
from launchguard.allocator.config import AllocatorConfig, parse_conf
from launchguard.allocator.expandable_segments import ExpandableSegmentsAllocator
from launchguard.events import Category, MemoryEvent, MemoryTimeline, Op, OutOfMemory, PhasePeak
from launchguard.units import MIB

ALLOC, FREE, PHASE, MODULE, EMPTY_CACHE = (int(op) for op in (Op.ALLOC, Op.FREE, Op.PHASE, Op.MODULE, Op.EMPTY_CACHE))


def make_allocator(config: AllocatorConfig, limit_bytes: int | None = None, total_bytes: int | None = None) -> CachingAllocator:
    """The allocator that a configuration selects. limit_bytes: what the driver can give it; total_bytes: the whole device's memory, of
    which per_process_memory_fraction is a share (default limit_bytes)."""
    kind = ExpandableSegmentsAllocator if config.expandable_segments else CachingAllocator
    return kind(config, Driver(limit_bytes), total_bytes)


def replay(
    events: Sequence[MemoryEvent], conf: str = "", limit_bytes: int | None = None, *, total_bytes: int | None = None
) -> MemoryTimeline:
    """What the allocator makes of one rank's events.

    conf: PYTORCH_CUDA_ALLOC_CONF; limit_bytes: bytes that the driver can give to this allocator (capacity - context - communication), None:
    without end; total_bytes: the whole device's, for per_process_memory_fraction. The replay ends at an allocation that fails even after
    everything cached was given back. ValueError for a schedule that frees what it does not hold.
    """
    allocator = make_allocator(parse_conf(conf), limit_bytes, total_bytes)
    record = _Recorder()
    oom = _run(events, allocator, record)
    at = record.peak_index
    return MemoryTimeline(
        phases=tuple(PhasePeak(name, *peak) for name, peak in record.phases.items()),
        allocated_bytes=record.allocated,
        reserved_bytes=record.reserved,
        phase=record.phase,
        module=record.module,
        live=_live(events, record.sizes, at),
        oom=oom,
        retries=allocator.retries,
    )


def smallest_limit(events: Sequence[MemoryEvent], conf: str, low: int, high: int, step: int = 2 * MIB) -> int:
    """Smallest limit_bytes in (low, high], in steps above low, under which the schedule runs to its end; high when no smaller one does.

    low: a limit that fails or is not of interest (the allocated peak); high: one that is known to work (the reserved peak of an
    unlimited replay: the driver never refuses it). Each trial is one replay, log2((high - low) / step) of them.
    """
    fails, works = 0, -(-(high - low) // step)
    while works - fails > 1:
        middle = (fails + works) // 2
        if replay(events, conf, low + middle * step).oom is None:
            works = middle
        else:
            fails = middle
    return min(high, low + works * step)


class _Peak(NamedTuple):
    """Of one phase. module: where the allocated peak was reached."""

    module: str
    allocated: int
    reserved: int


class _Recorder:
    """Peaks as the replay goes. sizes: of the block behind every ALLOC, in order (0 for a request of nothing)."""

    __slots__ = ("allocated", "module", "peak_index", "phase", "phases", "reserved", "sizes")

    def __init__(self) -> None:
        self.phases: dict[str, _Peak] = {}
        self.sizes: list[int] = []
        self.allocated = self.reserved = 0
        self.peak_index = -1
        self.phase = self.module = ""

    def close_phase(self, name: str, module: str, allocated: int, reserved: int, index: int) -> None:
        """Enter a phase that ends: its peaks, and the event at which allocated peaked. A name that comes again is the same phase."""
        old = self.phases.get(name)
        if old is None or allocated > old.allocated:
            self.phases[name] = _Peak(module, allocated, max(reserved, old.reserved if old else 0))
        elif reserved > old.reserved:
            self.phases[name] = old._replace(reserved=reserved)
        self.reserved = max(self.reserved, reserved)
        if allocated > self.allocated:
            self.allocated, self.phase, self.module, self.peak_index = allocated, name, module, index


def _run(events: Sequence[MemoryEvent], allocator: CachingAllocator, record: _Recorder) -> OutOfMemory | None:
    """Feed the allocator. One loop with local names only: it runs once per event, tens of thousands of times per rank."""
    blocks: dict[int, Block | None] = {}  # None: a request of nothing, which torch answers with a null pointer
    add_size, malloc, free, take = record.sizes.append, allocator.malloc, allocator.free, blocks.pop
    phase = module = peak_module = ""
    peak = peak_reserved = 0
    peak_index = start = -1
    for index, (op, handle, nbytes, _, label, stream) in enumerate(events):
        if op == ALLOC:
            if handle in blocks:
                raise ValueError(f"event {index} allocates handle {handle} ({label}), which is alive")
            if nbytes <= 0:
                blocks[handle] = None
                add_size(0)
                continue
            block = malloc(nbytes, stream)
            if block is None:
                record.close_phase(phase, peak_module, peak, peak_reserved, peak_index)
                return OutOfMemory(phase, module, label, allocator.segment_size(nbytes), allocator.allocated, allocator.reserved)
            blocks[handle] = block
            add_size(block.size)
            if allocator.allocated > peak:
                peak, peak_module, peak_index = allocator.allocated, module, index
            if allocator.reserved > peak_reserved:
                peak_reserved = allocator.reserved
        elif op == FREE:
            if handle not in blocks:
                raise ValueError(f"event {index} frees handle {handle}, which is not alive")
            block = take(handle)
            if block is not None:
                free(block)
        elif op == MODULE:
            module = label
        elif op == PHASE:
            if index - start > 1 or phase:
                record.close_phase(phase, peak_module, peak, peak_reserved, peak_index)
            phase, start, module, peak_module = label, index, "", ""
            peak, peak_reserved, peak_index = allocator.allocated, allocator.reserved, index
        elif op == EMPTY_CACHE:
            allocator.empty_cache()
    record.close_phase(phase, peak_module, peak, peak_reserved, peak_index)
    return None


def _live(events: Sequence[MemoryEvent], sizes: Sequence[int], last: int) -> Mapping[tuple[Category, str], int]:
    """(category, label) -> bytes of the blocks alive right after event `last`, largest first."""
    alive: dict[int, tuple[MemoryEvent, int]] = {}
    size = iter(sizes)
    for event in events[: last + 1]:
        if event[0] == ALLOC:
            alive[event[1]] = (event, next(size))
        elif event[0] == FREE:
            alive.pop(event[1], None)
    live: dict[tuple[Category, str], int] = {}
    for event, nbytes in alive.values():
        if nbytes:
            key = (event.category, event.label)
            live[key] = live.get(key, 0) + nbytes
    return dict(sorted(live.items(), key=lambda item: -item[1]))
