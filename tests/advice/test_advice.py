"""Every piece of advice is simulated, lowers the peak, keeps the global batch, and says where the change is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import transformers.models.llama.modeling_llama  # noqa: F401  (trace workers are forked from here: they start warm)

from launchguard import registry
from launchguard.advice import advise
from launchguard.advice._edits import edits_of
from launchguard.events import MemoryTimeline
from launchguard.job import DdpSpec, EvaluationSpec, FsdpSpec, JobSpec, Origin, Precision, SavingSpec, ZeroSpec
from launchguard.preflight import Simulator
from launchguard.profiles import device
from launchguard.units import GIB
from launchguard.verdict import Confidence, DeviceBudget, PhaseBytes, RankPrediction, Verdict, outside_allocator, worst_rank

MakeJob = Callable[..., JobSpec]
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
BF16 = Precision("bfloat16", "bfloat16", "bfloat16")
ZERO1 = ZeroSpec(stage=1, dtype="bfloat16", reduce_bucket_size=1_000_000)


def wide_job(make_job: MakeJob, **fields: Any) -> JobSpec:
    """A job of eight ranks whose 15 million parameters weigh more than its small batch."""
    return make_job(**{"ranks": 8, "config": WIDE, "micro_batch_size": 2, "seq_len": 32, "headroom": "0%", "loop": "trainer", **fields})


def with_room(job: JobSpec, room_bytes: int) -> JobSpec:
    """The job on a card that leaves so many bytes for torch."""
    return job.changed({"device": f"{(outside_allocator(job, device('24GiB')).total + room_bytes) / GIB:.6f}GiB"})


def needs(job: JobSpec) -> int:
    return worst_rank(Simulator(job).simulate(job).ranks).peak.allocated_bytes


def test_the_room_is_what_the_registry_lists() -> None:
    assert set(registry.names("advice")) == {
        "bound_evaluation", "checkpoint_activations", "expandable_segments", "load_on_one_rank", "raise_sharding", "shard_state_dict",
        "shrink_micro_batch",
    }  # fmt: skip
    for module in registry.load_all("advice").values():
        assert module.CODE.startswith("LG4") and module.SAFETY in ("safe", "review") and module.COST


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "zero", "zero": ZERO1, "precision": BF16},
        {"strategy": "ddp", "ddp": DdpSpec(), "precision": Precision(autocast="bfloat16", float32_outputs=True)},
        {"strategy": "fsdp2", "fsdp": FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP", reshard_after_forward=False),
         "precision": Precision("float32", "float32", "bfloat16", reduce="bfloat16")},
    ],
    ids=["zero1", "ddp", "fsdp2"],
)  # fmt: skip
def test_advice_is_simulated_and_helps(make_job: MakeJob, fields: dict[str, Any]) -> None:
    job = wide_job(make_job, **fields)
    job = with_room(job, int(0.97 * needs(job)))
    simulator = Simulator(job)
    verdict = simulator.simulate(job)
    assert verdict.verdict == "exceeds"
    advice = advise(verdict, simulator.simulate)
    before = worst_rank(verdict.ranks).peak.device_bytes
    assert "LG402" in {a.code for a in advice}
    assert all(a.device_bytes < before and a.changes for a in advice)
    assert [a.fits for a in advice] == sorted((a.fits for a in advice), reverse=True)


def test_a_smaller_micro_batch_keeps_the_global_batch(make_job: MakeJob) -> None:
    module = registry.load("advice", "shrink_micro_batch")
    job = make_job(micro_batch_size=12, gradient_accumulation_steps=2)
    for _, changes in module.apply(job):
        assert changes["micro_batch_size"] * changes["gradient_accumulation_steps"] == 24
    assert not module.applies(make_job(micro_batch_size=1))


def test_the_edit_is_in_the_file_that_set_the_value(make_job: MakeJob) -> None:
    job = wide_job(make_job, strategy="zero", zero=ZERO1, precision=BF16, seq_len=128)
    origins = {
        "zero.stage": Origin("ds.json", "zero_optimization.stage"),
        "micro_batch_size": Origin("command line", "--per_device_train_batch_size"),
    }
    changes = {
        "zero.stage": 3,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing.enabled": True,
        "ddp": None,
    }
    edits = {c.key: (c.file, c.old, c.new) for c in edits_of(job.changed({"origins": origins}), changes)}
    assert edits == {
        "zero_optimization.stage": ("ds.json", 1, 3),
        "--per_device_train_batch_size": ("command line", 2, 1),
        "--gradient_accumulation_steps": ("train args", None, 2),
        "--gradient_checkpointing": ("train args", None, True),
    }


def test_when_no_single_change_is_enough_they_are_combined(make_job: MakeJob) -> None:
    """With a simulation whose figures are plain: each adjustment saves 20 GiB of 100, and 65 are there."""
    job = wide_job(make_job, strategy="zero", zero=ZERO1, micro_batch_size=2)

    def simulate(changed: JobSpec) -> Verdict:
        assert changed.zero is not None
        saved = 20 * (changed.activation_checkpointing.enabled + (changed.micro_batch_size < 2) + (changed.zero.stage - 1) / 2)
        peak = PhaseBytes("backward_2", "", 0, 0, int((100 - saved) * GIB))
        rank = RankPrediction(tuple(range(8)), MemoryTimeline((), 0, 0, "", "", {}), (peak,), peak, {})
        budget = DeviceBudget("card", 65 * GIB, 0, 65 * GIB, "test")
        verdict = "fits" if peak.device_bytes <= 65 * GIB else "exceeds"
        return Verdict(verdict, changed, budget, (rank,), (), (), Confidence("high"), (0, 0), (), {})

    advice = advise(simulate(job), simulate)
    assert [(a.code, a.fits, a.device_bytes // GIB) for a in advice] == [
        ("LG450", True, 60), ("LG401", False, 80), ("LG402", False, 80), ("LG403", False, 80),
    ]  # fmt: skip
    assert {c.key for c in advice[0].changes} == {"--gradient_checkpointing", "zero_optimization.stage"}


def test_an_evaluation_that_is_too_large_is_bounded(make_job: MakeJob) -> None:
    job = make_job(loop="trainer", evaluation=EvaluationSpec(batch_size=8, loss_only=False, batches=200))
    simulator = Simulator(job)
    verdict = simulator.simulate(job.changed({"device": "24GiB"}))
    assert verdict.ranks[0].peak.name == "evaluation"
    job = with_room(job, int(0.5 * verdict.ranks[0].peak.allocated_bytes))
    simulator = Simulator(job)
    verdict = simulator.simulate(job)
    [bound] = [a for a in advise(verdict, simulator.simulate) if a.code == "LG405"]
    assert bound.fits and [(c.file, c.key, c.new) for c in bound.changes] == [("train args", "--eval_accumulation_steps", 1)]


@pytest.mark.parametrize(
    ("changes", "copies", "code"),
    [({}, 1.5, "LG407"), ({"saving": SavingSpec(), "fsdp.cpu_ram_efficient_loading": True}, 1.5, "LG406")],
    ids=["load", "save"],
)
def test_a_short_host_loads_on_one_rank_and_saves_in_shards(make_job: MakeJob, changes: dict[str, Any], copies: float, code: str) -> None:
    """Two nodes of two ranks: two copies at load (with transformers 4); both moments, as large as two copies, on rank 0 when a full state
    dict is saved."""
    job = make_job(ranks=4, loop="trainer", strategy="fsdp2", fsdp=FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP"))
    job = job.changed({"launch": dataclasses.replace(job.launch, nnodes=2, nproc_per_node=2), "versions": {"transformers": "4.57.6"}})
    breakdown = Simulator(job).simulate(job).host[0].breakdown
    copy, processes = breakdown["model as loaded by each of 2 ranks"] / 2, breakdown["processes (Python and libraries)"]
    job = job.changed({**changes, "host_memory": str(int(processes + copies * copy))})
    simulator = Simulator(job)
    verdict = simulator.simulate(job)
    assert verdict.verdict == "exceeds" and verdict.ranks[0].oom is None
    assert [(a.code, a.fits) for a in advise(verdict, simulator.simulate)] == [(code, True)]
