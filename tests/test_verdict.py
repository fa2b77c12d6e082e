"""Where a rank fails: at the device's own limit when it does not fit there, at the headroom when only that is missing."""

from __future__ import annotations

from collections.abc import Callable

from launchguard.events import Category, MemoryEvent, Op, RankSchedule
from launchguard.job import JobSpec
from launchguard.units import GIB
from launchguard.verdict import DeviceBudget, Outside, RankPrediction, predict_rank

MakeJob = Callable[..., JobSpec]
NOTHING = Outside(0, 0, 0, 0, 0, 0)


def _rank(job: JobSpec, sizes_gib: list[float], usable_gib: float, budget_gib: float) -> RankPrediction:
    """A rank that allocates one block in each phase p0, p1, ... and frees nothing."""
    events: list[MemoryEvent] = []
    for i, size in enumerate(sizes_gib):
        events += [MemoryEvent(Op.PHASE, label=f"p{i}"), MemoryEvent(Op.ALLOC, i + 1, int(size * GIB), Category.PARAMETERS, "block")]
    usable, budget = int(usable_gib * GIB), int(budget_gib * GIB)
    return predict_rank(RankSchedule((0,), tuple(events)), job, NOTHING, DeviceBudget("card", usable, usable - budget, budget, "test"))


def test_the_device_itself_is_full(make_job: MakeJob) -> None:
    rank = _rank(make_job(), [4, 3, 2, 2], usable_gib=10, budget_gib=6)
    assert rank.oom is not None and rank.oom.phase == "p3"


def test_only_the_headroom_is_missing(make_job: MakeJob) -> None:
    rank = _rank(make_job(), [4, 3, 2], usable_gib=10, budget_gib=6)
    assert rank.oom is not None and rank.oom.phase == "p1"


def test_it_fits(make_job: MakeJob) -> None:
    assert _rank(make_job(), [4, 1], usable_gib=10, budget_gib=6).oom is None
