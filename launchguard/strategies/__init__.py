"""How training state is laid out over ranks: one file per strategy, each with

    representatives(job, trace) -> list of groups of ranks that cannot differ in memory; the first rank of each is simulated
    schedule(job, trace, ranks, device) -> RankSchedule of such a group

Every rule names the library version and function it was read in; a file's READ_IN sums them up: library -> version, as far as it matters.
"""

from __future__ import annotations

import dataclasses

from launchguard import registry
from launchguard.events import RankSchedule, StepTrace
from launchguard.job import TRAINER_LOOPS, JobSpec, Note
from launchguard.profiles import DeviceProfile, optimizer
from launchguard.strategies._ddp_hooks import HOOKS
from launchguard.strategies._evaluation import ASSUMED_BATCHES, kept_bytes
from launchguard.strategies._host import node_phases

__all__ = ["evaluation_growth", "node_phases", "read_in", "schedules", "with_notes"]
TORCH, TRANSFORMERS, ACCELERATE, TRL, PEFT = "2.13", "5.24", "1.15", "1.16", "0.21"  # that the trace's and the loops' rules were read in


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


def with_notes(job: JobSpec) -> JobSpec:
    """The job with what is doubtful about its rules among its notes: libraries of other versions, an optimizer that no test compares, a
    communication hook without rules, a loop whose rows are pairs."""
    doubts = (*_version_notes(job), *_optimizer_notes(job), *_hook_notes(job), *_loop_notes(job))
    fresh = [note for note in doubts if note not in job.notes]
    return dataclasses.replace(job, notes=(*job.notes, *fresh))


def read_in(job: JobSpec) -> dict[str, str]:
    """The versions in which the rules that apply to a job were read."""
    found = {"torch": TORCH, **getattr(registry.load("strategies", job.strategy), "READ_IN", {})}
    if job.loop in (*TRAINER_LOOPS, "accelerate"):
        found["accelerate"] = ACCELERATE
    if job.loop in TRAINER_LOOPS:
        found["transformers"] = TRANSFORMERS
    if job.loop in ("sft", "dpo"):
        found["trl"] = TRL
    if job.lora is not None:
        found["peft"] = PEFT
    return found


def _version_notes(job: JobSpec) -> list[Note]:
    notes = []
    for library, version in read_in(job).items():
        installed = job.versions.get(library)
        if installed is not None and not f"{installed.partition('+')[0]}.".startswith(f"{version}."):
            message = (
                f"{library} {installed} is installed; the rules for it were read in {version}: bytes may differ where it has changed since"
            )
            notes.append(Note("LG330", "info", message, f"{library} {installed}"))
    return notes


def _optimizer_notes(job: JobSpec) -> list[Note]:
    profile = optimizer(job.optimizer.name)
    if profile.checked:
        return []
    message = f"optimizer {job.optimizer.name} was not compared with the real class: {profile.source}"
    return [Note("LG331", "info", message, str(job.origin("optimizer.name")))]


def _hook_notes(job: JobSpec) -> list[Note]:
    hook = job.ddp.comm_hook if job.strategy == "ddp" and job.ddp is not None else None
    if hook in (None, "no", *HOOKS):
        return []
    message = (
        f"DDP's communication hook {hook} is not modelled: predicted as if gradients were reduced in place (known: {', '.join(HOOKS)})"
    )
    return [Note("LG332", "warning", message, str(job.origin("ddp.comm_hook")))]


def _loop_notes(job: JobSpec) -> list[Note]:
    if job.loop != "dpo":
        return []
    message = "DPOTrainer's pairs of rows are not modelled: predicted as single rows; rehearse runs them"
    return [Note("LG310", "warning", message, str(job.origin("loop")))]  # trl 1.16 trainer/dpo_trainer.py
