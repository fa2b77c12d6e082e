"""A schedule's timeline: phases, places, what is alive at the peak, out of memory."""

from __future__ import annotations

import random
import time

import pytest

from launchguard.allocator import replay, smallest_limit
from launchguard.events import Category, MemoryEvent, Op
from launchguard.units import MIB

P, A, G = Category.PARAMETERS, Category.ACTIVATIONS, Category.GRADIENTS


def alloc(handle: int, mib: float, category: Category = A, label: str = "", stream: int = 0) -> MemoryEvent:
    return MemoryEvent(Op.ALLOC, handle, int(mib * MIB), category, label, stream)


def free(handle: int) -> MemoryEvent:
    return MemoryEvent(Op.FREE, handle)


def phase(name: str) -> MemoryEvent:
    return MemoryEvent(Op.PHASE, label=name)


def module(name: str) -> MemoryEvent:
    return MemoryEvent(Op.MODULE, label=name)


def small_job() -> list[MemoryEvent]:
    return [
        phase("load"),
        alloc(1, 40, P, "weight"),
        phase("forward"),
        module("layers.0"),
        alloc(2, 30, A, "layers.0"),
        module("layers.1"),
        alloc(3, 30, A, "layers.1"),
        alloc(4, 50, A, "layers.1"),
        free(4),
        phase("backward"),
        module("layers.1"),
        alloc(5, 40, G, "weight"),
        free(3),
        free(2),
        phase("step"),
        free(5),
    ]


def test_timeline() -> None:
    timeline = replay(small_job())
    assert [(p.name, p.module, p.allocated_bytes // MIB, p.reserved_bytes // MIB) for p in timeline.phases] == [
        ("load", "", 40, 40),
        ("forward", "layers.1", 150, 150),
        ("backward", "layers.1", 140, 150),
        ("step", "", 80, 150),
    ]
    assert (timeline.phase, timeline.module) == ("forward", "layers.1")
    assert timeline.live == {(A, "layers.1"): 80 * MIB, (P, "weight"): 40 * MIB, (A, "layers.0"): 30 * MIB}
    assert timeline.oom is None and timeline.retries == 0


def test_a_name_that_comes_twice_is_one_phase() -> None:
    events = [phase("forward"), alloc(1, 2), phase("backward"), free(1), phase("forward"), module("x"), alloc(2, 4), alloc(3, 4)]
    peaks = replay(events).phases
    assert [(p.name, p.module, p.allocated_bytes // MIB) for p in peaks] == [("forward", "x", 8), ("backward", "", 2)]


def test_a_phase_inherits_what_is_alive() -> None:
    timeline = replay([phase("a"), module("m"), alloc(1, 30), phase("b"), free(1), alloc(2, 2)])
    assert [(p.name, p.module, p.allocated_bytes // MIB) for p in timeline.phases] == [("a", "m", 30), ("b", "", 30)]
    assert timeline.phase == "a"  # the first time that the peak was reached


def test_out_of_memory_stops_with_torchs_figures() -> None:
    timeline = replay(small_job(), limit_bytes=110 * MIB)
    assert timeline.oom is not None
    oom = timeline.oom
    assert (oom.phase, oom.module, oom.label) == ("forward", "layers.1", "layers.1")
    assert (oom.requested_bytes, oom.allocated_bytes, oom.reserved_bytes) == (50 * MIB, 100 * MIB, 100 * MIB)
    assert timeline.allocated_bytes == 100 * MIB and [p.name for p in timeline.phases] == ["load", "forward"]


def test_requested_bytes_of_an_oom_are_the_segment() -> None:
    timeline = replay([alloc(1, 3)], limit_bytes=10 * MIB)
    assert timeline.oom is not None and timeline.oom.requested_bytes == 20 * MIB


def test_retry_is_counted() -> None:
    events = [alloc(1, 40), free(1), alloc(2, 60)]
    assert replay(events, limit_bytes=70 * MIB).retries == 1
    assert replay(events).retries == 0


def test_empty_cache_event() -> None:
    events = [phase("a"), alloc(1, 40), free(1), MemoryEvent(Op.EMPTY_CACHE), phase("b"), alloc(2, 30)]
    assert [p.reserved_bytes // MIB for p in replay(events).phases] == [40, 30]


def test_request_of_nothing() -> None:
    timeline = replay([alloc(1, 0), alloc(2, 1), free(1), free(2)])
    assert timeline.allocated_bytes == MIB and sum(timeline.live.values()) == MIB


@pytest.mark.parametrize("events", [[free(1)], [alloc(1, 1), alloc(1, 1)], [alloc(1, 1), free(1), free(1)]])
def test_broken_schedules(events: list[MemoryEvent]) -> None:
    with pytest.raises(ValueError, match="handle 1"):
        replay(events)


def test_memory_fraction_is_of_the_whole_device() -> None:
    events = [alloc(1, 40), alloc(2, 40)]
    assert replay(events, "per_process_memory_fraction:0.5", 100 * MIB, total_bytes=200 * MIB).oom is None
    assert replay(events, "per_process_memory_fraction:0.5", 100 * MIB, total_bytes=120 * MIB).oom is not None


def test_smallest_limit() -> None:
    """Fragmented without a limit; with one, the retry gives the cached segments back first."""
    events = [alloc(1, 40), free(1), alloc(2, 60), free(2), alloc(3, 80)]
    whole = replay(events)
    assert (whole.allocated_bytes, whole.reserved_bytes) == (80 * MIB, 180 * MIB)
    least = smallest_limit(events, "", 60 * MIB, whole.reserved_bytes)
    assert least == 80 * MIB
    assert replay(events, limit_bytes=least).oom is None and replay(events, limit_bytes=least - 2 * MIB).oom is not None


def long_schedule(count: int, seed: int = 0) -> list[MemoryEvent]:
    """Allocations and frees as training makes them: mostly last in, first out, sizes that repeat."""
    choose = random.Random(seed)
    sizes, events, live, handle = (33_000_000, 8_000_000, 16_777_216, 300_000, 8_192), [phase("forward")], [], 0
    while len(events) < count:
        if len(live) < 100 or (choose.random() < 0.5 and len(live) < 2_000):
            events.append(MemoryEvent(Op.ALLOC, handle, choose.choice(sizes), A, f"layers.{handle % 32}"))
            live.append(handle)
            handle += 1
        else:
            events.append(free(live.pop(-choose.randint(1, 3))))
    return events


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_live_sums_to_the_peak(conf: str) -> None:
    timeline = replay(long_schedule(4_000), conf)
    assert sum(timeline.live.values()) == timeline.allocated_bytes == max(p.allocated_bytes for p in timeline.phases)
    assert timeline.reserved_bytes == max(p.reserved_bytes for p in timeline.phases)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_speed(conf: str) -> None:
    """40,000 events take 0.11 s on two shared cores; the bound is loose, for busy machines: it catches a change of complexity."""
    events = long_schedule(40_000)
    start = time.perf_counter()
    replay(events, conf)
    assert time.perf_counter() - start < 1.5
