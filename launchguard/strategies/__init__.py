"""How training state is laid out over ranks: one file per strategy, each with

    representatives(job, trace) -> list of groups of ranks that cannot differ in memory; the first rank of each is simulated
    schedule(job, trace, ranks, device) -> RankSchedule of such a group

Every rule names the library version and function it was read in.
"""

from __future__ import annotations

from launchguard import registry
from launchguard.events import RankSchedule, StepTrace
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._evaluation import ASSUMED_BATCHES, kept_bytes
from launchguard.strategies._host import node_phases

__all__ = ["evaluation_growth", "node_phases", "schedules"]


def evaluation_growth(job: JobSpec, trace: StepTrace) -> tuple[int, int] | None:
    """(batches simulated, bytes that one more adds to the peak of the evaluation), when what an evaluation keeps on the device has no
    bound: every batch is in the old and in the new tensor while they are concatenated."""
    spec = job.evaluation
    if spec is None or trace.evaluation is None or spec.loss_only or spec.batches or spec.accumulation_steps or spec.per_batch:
        return None
    kept = sum(kept_bytes(spec, trace.evaluation)) * job.world_size
    return (ASSUMED_BATCHES, kept * (2 if spec.concatenate else 1)) if kept else None


def schedules(job: JobSpec, trace: StepTrace, device: DeviceProfile) -> list[RankSchedule]:
    """One schedule for every kind of rank of the job. Raises InputError for a strategy that is not known."""
    strategy = registry.load("strategies", job.strategy)
    return [strategy.schedule(job, trace, ranks, device) for ranks in strategy.representatives(job, trace)]
