"""What an evaluation keeps on the device, by the loop's own rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launchguard import strategies, trace
from launchguard.allocator import replay
from launchguard.job import EvaluationSpec, JobSpec
from launchguard.profiles import device
from launchguard.verdict import device_budget, judge

CARD = device("2GiB")
VOCABULARY = 515  # conftest: TINY_LLAMA


def peak(job: JobSpec) -> int:
    [schedule] = strategies.schedules(job, trace.trace_job(job, CARD), CARD)
    return next(p.allocated_bytes for p in replay(schedule.events).phases if p.name == "evaluation")


def spec(**fields: object) -> EvaluationSpec:
    return EvaluationSpec(**{"batch_size": 4, "loss_only": False, **fields})  # type: ignore[arg-type]


def test_no_evaluation_no_phase(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(loop="trainer")
    assert "evaluation" not in {
        p.name for s in strategies.schedules(job, trace.trace_job(job, CARD), CARD) for p in replay(s.events).phases
    }


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_batch_adds_itself_twice_to_the_peak(make_job: Callable[..., JobSpec], ranks: int) -> None:
    job = make_job(ranks=ranks, loop="trainer", strategy="ddp" if ranks > 1 else "single", evaluation=spec(batches=20))
    logits = 4 * 64 * VOCABULARY * 4 * ranks
    more = peak(job.changed({"evaluation.batches": 21})) - peak(job)
    assert more == pytest.approx(2 * logits, rel=0.02)  # labels beside them
    assert peak(job.changed({"evaluation.concatenate": False, "evaluation.batches": 21})) - peak(
        job.changed({"evaluation.concatenate": False})
    ) == pytest.approx(logits, rel=0.02)


def test_bounds(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(loop="trainer", evaluation=spec(batches=50, accumulation_steps=2))
    assert peak(job) == peak(job.changed({"evaluation.batches": 500}))
    assert peak(job.changed({"evaluation.loss_only": True})) < peak(job) < peak(job.changed({"evaluation.accumulation_steps": None}))
    assert peak(job.changed({"evaluation.per_batch": True})) < peak(job)
    assert peak(job.changed({"evaluation.reduced": True})) < peak(job)


def test_a_set_of_unknown_size_is_said_with_what_fits(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(loop="trainer", evaluation=spec())
    traced = trace.trace_job(job, CARD)
    verdict = judge(job, traced, strategies.schedules(job, traced, CARD), CARD, device_budget(CARD, "0%"))
    [note] = [n for n in verdict.notes if n.code == "LG219"]
    most = int(note.message.split("at most ")[1].split()[0])
    limit = verdict.device.budget_bytes - CARD.context_bytes
    assert peak(job.changed({"evaluation.batches": most})) <= limit < peak(job.changed({"evaluation.batches": most + most // 100}))
