"""Main memory of a node, by phase: figures follow from the model's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from launchguard import strategies, trace
from launchguard.job import EvaluationSpec, FsdpSpec, JobSpec, Precision, SavingSpec, ZeroSpec
from launchguard.profiles import device
from launchguard.report import text
from launchguard.report.json import SCHEMA_FILE, to_dict
from launchguard.units import dtype_bytes
from launchguard.verdict import Verdict, device_budget, judge

CARD = device("2GiB")
HALF = Precision("bfloat16", "bfloat16", "bfloat16", reduce="bfloat16")
EVALUATION = EvaluationSpec(batch_size=4, loss_only=False, batches=6)


def verdict(job: JobSpec) -> Verdict:
    traced = trace.trace_job(job, CARD)
    return judge(job, traced, strategies.schedules(job, traced, CARD), CARD, device_budget(CARD, "0%"))


def phases(job: JobSpec) -> dict[str, int]:
    traced = trace.trace_job(job, CARD)
    found = strategies.node_phases(job, traced, strategies.schedules(job, traced, CARD))
    return {phase.name: sum(phase.bytes_by_label.values()) for phase in found}


def numel(job: JobSpec) -> int:
    return sum(p.numel for p in trace.trace_job(job, CARD).params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_loads_a_copy(make_job: Callable[..., JobSpec], dtype: str) -> None:
    job = make_job(ranks=4, loop="trainer", strategy="ddp", precision=Precision(dtype, dtype, dtype))
    assert phases(job)["load"] == 4 * dtype_bytes(dtype) * numel(job)


def test_efficient_loading_is_one_copy_a_node(make_job: Callable[..., JobSpec]) -> None:
    spec = FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP", state_dict_type="SHARDED_STATE_DICT")
    job = make_job(ranks=4, loop="trainer", strategy="fsdp2", fsdp=spec, saving=SavingSpec())
    n = numel(job)
    assert phases(job)["load"] == 4 * 4 * n
    assert phases(job.changed({"fsdp.cpu_ram_efficient_loading": True}))["load"] == 4 * n
    assert phases(job)["save"] == pytest.approx(8 * n, rel=0.01)  # four quarters of both moments
    assert phases(job.changed({"fsdp.state_dict_type": "FULL_STATE_DICT"}))["save"] == 8 * n  # all of them, on rank 0


def test_fsdp_offload_pins_in_powers_of_two(make_job: Callable[..., JobSpec]) -> None:
    spec = FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP", offload_params=True)
    job = make_job(ranks=4, loop="trainer", strategy="fsdp2", fsdp=spec)
    n = numel(job)
    held = phases(job)["step_2"]
    assert 4 * (4 + 4 + 8) * n // 4 < held < 4 * (8 + 8 + 9) * n // 4


@pytest.mark.parametrize(("stage", "gather", "per_rank"), [(2, False, 4), (3, True, 1), (3, False, 0)])
def test_zero_saves(make_job: Callable[..., JobSpec], stage: int, gather: bool, per_rank: int) -> None:
    zero = ZeroSpec(stage=stage, dtype="bfloat16", zero_init=stage == 3, stage3_gather_16bit_weights_on_model_save=gather)
    job = make_job(ranks=4, loop="trainer", strategy="zero", zero=zero, precision=HALF, saving=SavingSpec(), config={"dtype": "bfloat16"})
    assert phases(job).get("save", 0) == per_rank * 2 * numel(job)
    assert phases(job)["load"] == (1 if stage == 3 else 4) * 2 * numel(job)


def test_offloaded_states_stay_while_it_saves(make_job: Callable[..., JobSpec]) -> None:
    zero = ZeroSpec(stage=2, dtype="bfloat16", offload_optimizer="cpu")
    job = make_job(ranks=2, loop="trainer", strategy="zero", zero=zero, precision=HALF, saving=SavingSpec()).changed(
        {"optimizer.implementation": "cpu"}
    )
    found = phases(job)
    assert found["save"] == found["step_2"] + 2 * 2 * numel(job)
    assert found["step_2"] >= 18 * numel(job)  # both ranks together: master, gradient, two moments, staging


def test_predictions_end_on_every_rank(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(ranks=2, loop="trainer", strategy="ddp", evaluation=EVALUATION)
    logits = 4 * 64 * 515 * 4 * 2 * 6  # batch, tokens, vocabulary, float32, ranks gathered, batches
    assert phases(job)["evaluation"] == pytest.approx(2 * logits, rel=0.01)
    assert phases(job.changed({"evaluation.accumulation_steps": 2}))["evaluation"] == pytest.approx(4 * logits, rel=0.01)


def test_only_the_host_is_short(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(ranks=4, loop="trainer", strategy="ddp", device="2GiB", host_memory="1MiB")
    found = verdict(job)
    assert found.verdict == "exceeds" and found.ranks[0].oom is None
    assert [c.category for c in found.causes] == ["host"] * len(found.causes) and found.causes
    printed = text.render(found, (), color=False, width=120)
    assert "error[LG102]: node 0 needs" in printed and "LG101" not in printed
    document = to_dict(found, ())
    jsonschema.validate(document, json.loads(SCHEMA_FILE.read_text()))
    assert document["host"][0]["peak_bytes"] == sum(document["host"][0]["breakdown"].values())
    assert verdict(job.changed({"host_memory": "64GiB"})).verdict == "fits"


def test_another_machines_memory_is_not_guessed(make_job: Callable[..., JobSpec]) -> None:
    found: Any = verdict(make_job(ranks=4, loop="trainer", strategy="ddp", device="2GiB"))
    assert found.verdict == "fits" and found.host[0].budget_bytes is None and found.host[0].peak_bytes > 0
