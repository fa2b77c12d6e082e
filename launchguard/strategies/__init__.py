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


def schedules(job: JobSpec, trace: StepTrace, device: DeviceProfile) -> list[RankSchedule]:
    """One schedule for every kind of rank of the job. Raises InputError for a strategy that is not known."""
    strategy = registry.load("strategies", job.strategy)
    return [strategy.schedule(job, trace, ranks, device) for ranks in strategy.representatives(job, trace)]
