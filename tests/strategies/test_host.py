"""Main memory of a node, by phase: figures follow from the model's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from launchguard import strategies, trace
from launchguard.job import ActivationCheckpointing, EvaluationSpec, FsdpSpec, JobSpec, Precision, SavingSpec, ZeroSpec
from launchguard.profiles import device
from launchguard.report import text
from launchguard.report.json import SCHEMA_FILE, to_dict
from launchguard.strategies._host import PROCESS_BYTES, WORKER_BYTES
from launchguard.units import dtype_bytes
from launchguard.verdict import Verdict, device_budget, judge

CARD = device("2GiB")
HALF = Precision("bfloat16", "bfloat16", "bfloat16", reduce="bfloat16")
EVALUATION = EvaluationSpec(batch_size=4, loss_only=False, batches=6)


def verdict(job: JobSpec) -> Verdict:
    traced = trace.trace_job(job, CARD)
    return judge(job, traced, strategies.schedules(job, traced, CARD), CARD, device_budget(CARD, "0%"))


def nodes(job: JobSpec) -> dict[str, dict[str, int]]:
    traced = trace.trace_job(job, CARD)
    found = strategies.node_phases(job, traced, strategies.schedules(job, traced, CARD))
    return {phase.name: dict(phase.bytes_by_label) for phase in found}


def phases(job: JobSpec) -> dict[str, int]:
    """Bytes by phase beside the processes themselves and the batches on their way."""
    beside = ("processes (Python and libraries)", "batches ready for the device")
    return {name: sum(n for label, n in found.items() if label not in beside) for name, found in nodes(job).items()}


def numel(job: JobSpec) -> int:
    return sum(p.numel for p in trace.trace_job(job, CARD).params)


OLD = {"versions": {"transformers": "4.57.6"}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cast_checkpoint_is_a_copy_on_every_rank(make_job: Callable[..., JobSpec], dtype: str) -> None:
    """The checkpoint is in float32: kept so, it is mapped."""
    job = make_job(ranks=4, loop="trainer", strategy="ddp", precision=Precision(dtype, dtype, dtype))
    assert phases(job)["load"] == (4 * 2 * numel(job) if dtype == "bfloat16" else 0)
    assert phases(job.changed(OLD))["load"] == 4 * dtype_bytes(dtype) * numel(job)


def test_efficient_loading_is_one_copy_a_node_with_transformers_4(make_job: Callable[..., JobSpec]) -> None:
    spec = FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP", state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=True)
    job = make_job(ranks=4, loop="trainer", strategy="fsdp2", fsdp=spec, saving=SavingSpec(), config={"dtype": "bfloat16"})
    n = numel(job)
    assert phases(job)["load"] == 4 * 4 * n  # 5 reads the values on every rank, and they are cast
    assert phases(job.changed(OLD))["load"] == 4 * n
    assert phases(job)["save"] == pytest.approx(8 * n, rel=0.01)  # four quarters of both moments
    assert phases(job.changed({"fsdp.state_dict_type": "FULL_STATE_DICT"}))["save"] == 8 * n  # all of them, on rank 0


def test_fsdp2_upcasts_on_the_host(make_job: Callable[..., JobSpec]) -> None:
    """A bfloat16 checkpoint is mapped, then turned into float32 on every rank."""
    precision = Precision("bfloat16", "float32", "bfloat16", reduce="bfloat16")
    spec = FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP")
    job = make_job(ranks=4, loop="trainer", strategy="fsdp2", fsdp=spec, precision=precision, config={"dtype": "bfloat16"})
    assert phases(job)["load"] == 4 * 4 * numel(job)
    one = job.changed({"strategy": "fsdp1", "fsdp.version": 1})
    assert phases(one)["load"] == 0  # FSDP1 does it with shards, on the device


def test_deepspeed_casts_on_the_host(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(ranks=2, loop="trainer", strategy="zero", zero=ZeroSpec(stage=2, dtype="bfloat16"))
    assert phases(job)["load"] == 2 * 2 * numel(job)


# One run of host_worker.py: a bfloat16 Llama of 77,865,984 parameters; torch 2.13.0 (CPU), transformers 5.24.0, deepspeed 0.19.8.
MEASURED = {
    "process": 321_585_152, "mapped": 2_146_304, "cast": 311_721_984, "efficient, rank 0": 307_306_496, "efficient, rank 1": 307_146_752,
    "worker": 9_623_552, "zero3 prepare": 991_133_696, "zero3 step": 1_614_901_248,
}  # fmt: skip
MEASURED_MODEL = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 16000, "dtype": "bfloat16",
}  # fmt: skip


def test_a_measured_process_that_loads(make_job: Callable[..., JobSpec]) -> None:
    fields: dict[str, Any] = {"loop": "trainer", "config": MEASURED_MODEL}
    kept, cast = make_job(strategy="ddp", precision=HALF, **fields), make_job(strategy="ddp", **fields)
    assert numel(kept) == 77_865_984
    assert phases(kept)["load"] == 0 and MEASURED["mapped"] < 0.02 * 2 * numel(kept)
    assert phases(cast)["load"] == pytest.approx(MEASURED["cast"], rel=0.01)
    spec = FsdpSpec(wrap_policy="TRANSFORMER_BASED_WRAP", cpu_ram_efficient_loading=True)
    both = make_job(ranks=2, strategy="fsdp1", fsdp=spec, **fields)
    assert phases(both)["load"] == pytest.approx(MEASURED["efficient, rank 0"] + MEASURED["efficient, rank 1"], rel=0.02)
    assert MEASURED["process"] == pytest.approx(PROCESS_BYTES, rel=0.02) and MEASURED["worker"] == pytest.approx(WORKER_BYTES, rel=0.1)


def test_a_measured_process_that_offloads_zero3(make_job: Callable[..., JobSpec]) -> None:
    """Not among the predicted bytes: the 55 MB that the process gained besides (DeepSpeed's engine, the card that it takes the CPU for)."""
    zero = ZeroSpec(
        stage=3, dtype="bfloat16", zero_init=True, offload_optimizer="cpu", offload_param="cpu", offload_pin_memory=False,
        reduce_bucket_size=1_000_000,
    )  # fmt: skip
    job = make_job(loop="trainer", strategy="zero", zero=zero, precision=HALF, config=MEASURED_MODEL)
    job = job.changed({"optimizer.implementation": "cpu"})
    found = phases(job)
    found["prepare"] -= nodes(job)["prepare"]["gradient buffers at init"]  # measured when they have gone
    for name, phase in (("zero3 prepare", "prepare"), ("zero3 step", "step_2")):
        assert 0.94 * MEASURED[name] < found[phase] <= MEASURED[name], phase
    assert found["step_2"] == pytest.approx(20 * numel(job), rel=0.001)


def test_processes_workers_and_their_batches(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(ranks=4, loop="trainer", strategy="ddp", dataloader_workers=3)
    found, alone = nodes(job), nodes(job.changed({"dataloader_workers": 0}))
    batch = 3 * 2 * 64 * 8  # ids, mask, labels
    assert alone["step_2"]["batches ready for the device"] <= 4 * batch < found["step_2"]["batches ready for the device"] <= 7 * 4 * batch
    assert found["load"]["data loader workers"] == 3 * 4 * WORKER_BYTES and "data loader workers" not in alone["load"]


@pytest.mark.parametrize(("stage", "expected"), [(0, 24), (2, 12), (3, 12)])
def test_zero_reads_a_checkpoint_on_every_rank(make_job: Callable[..., JobSpec], stage: int, expected: int) -> None:
    """Both ranks the 16-bit model (4 bytes), or their parts of masters and moments (12; stage 0: the whole)."""
    job = make_job(ranks=2, loop="trainer", strategy="zero", zero=ZeroSpec(stage=stage, dtype="bfloat16"), precision=HALF, resume=True)
    read = nodes(job)["resume"]["checkpoint as read by its ranks"]
    assert read == pytest.approx(expected * numel(job), rel=0.001)


@pytest.mark.parametrize(("version", "copies"), [(1, 4), (2, 2)])
def test_fsdp_reads_a_full_checkpoint(make_job: Callable[..., JobSpec], version: int, copies: int) -> None:
    """FSDP1: the model on each of 4 ranks; FSDP2: on rank 0, and so the moments, which are more."""
    spec = FsdpSpec(version=version, wrap_policy="TRANSFORMER_BASED_WRAP")
    job = make_job(ranks=4, loop="trainer", strategy=f"fsdp{version}", fsdp=spec, resume=True)
    assert phases(job)["resume"] == 4 * copies * numel(job)
    assert phases(job.changed({"fsdp.state_dict_type": "SHARDED_STATE_DICT"}))["resume"] == 0


def test_one_process_reads_the_moments_to_its_host(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(ranks=1, loop="trainer", strategy="single", resume=True)
    assert phases(job)["resume"] == pytest.approx(8 * numel(job), rel=0.001)
    assert phases(make_job(ranks=2, loop="trainer", strategy="ddp", resume=True))["resume"] == 0


def test_fsdp_offload_pins_in_powers_of_two(make_job: Callable[..., JobSpec]) -> None:
    spec = FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP", offload_params=True)
    job = make_job(ranks=4, loop="trainer", strategy="fsdp2", fsdp=spec)
    n = numel(job)
    held = phases(job)["step_2"]
    assert 4 * (4 + 4 + 8) * n // 4 < held < 4 * (8 + 8 + 9) * n // 4


def test_offloaded_checkpoints_wait_in_pinned_blocks(make_job: Callable[..., JobSpec]) -> None:
    ckpt = ActivationCheckpointing(True, offload=True)
    job = make_job(ranks=2, loop="trainer", strategy="ddp", config={"num_hidden_layers": 3}, seq_len=96, activation_checkpointing=ckpt)
    hidden = 4 * job.micro_batch_size * 96 * job.model.config["hidden_size"]
    assert nodes(job)["step_1"]["saved activations (pinned)"] == 2 * 3 * (1 << (hidden - 1).bit_length())


@pytest.mark.parametrize(("stage", "gather", "per_rank"), [(2, False, 4), (3, True, 1), (3, False, 0)])
def test_zero_saves(make_job: Callable[..., JobSpec], stage: int, gather: bool, per_rank: int) -> None:
    zero = ZeroSpec(stage=stage, dtype="bfloat16", zero_init=stage == 3, stage3_gather_16bit_weights_on_model_save=gather)
    job = make_job(ranks=4, loop="trainer", strategy="zero", zero=zero, precision=HALF, saving=SavingSpec(), config={"dtype": "bfloat16"})
    assert phases(job).get("save", 0) == per_rank * 2 * numel(job)
    assert phases(job)["load"] == 0  # a bfloat16 checkpoint in bfloat16


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


def test_nvme_offload_holds_buffers_in_place_of_states(make_job: Callable[..., JobSpec]) -> None:
    zero = ZeroSpec(stage=3, dtype="bfloat16", zero_init=True, offload_optimizer="cpu", offload_param="cpu", offload_param_buffer_size=1000)
    base = make_job(ranks=2, loop="trainer", strategy="zero", zero=zero, precision=HALF)
    job = base.changed({"optimizer.implementation": "cpu"})
    swapped = job.changed({"zero.offload_optimizer": "nvme", "zero.offload_param": "nvme", "zero.sub_group_size": 500})
    found = nodes(swapped)["step_2"]
    assert found["NVMe swap buffers of the optimizer (pinned)"] == 4 * 500 * 4 * 2  # buffers, elements of a sub-group, float32, ranks
    assert found["NVMe swap buffers of parameters (pinned)"] == 5 * 1000 * 2 * 2
    assert not {"exp_avg", "exp_avg_sq", "fp32 master partition", "parameter partition"} & set(found)
    held = nodes(job)["step_2"]
    assert {"exp_avg", "exp_avg_sq", "fp32 master partition", "parameter partition"} <= set(held)
