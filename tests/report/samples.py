"""Verdicts made by hand, for the tests of the report. Figures are invented."""

from __future__ import annotations

import dataclasses

from launchguard.events import Category, MemoryTimeline, OutOfMemory
from launchguard.interval import interval_of
from launchguard.job import JobSpec, LaunchSpec, ModelSpec, Note, Origin, ZeroSpec
from launchguard.units import GIB
from launchguard.verdict import (
    Advice,
    Cause,
    Change,
    Confidence,
    DeviceBudget,
    HostPrediction,
    PhaseBytes,
    RankPrediction,
    Verdict,
)


def size(gib: float) -> int:
    return int(gib * GIB)


def job(world_size: int = 8, headroom: str = "10%") -> JobSpec:
    launch = LaunchSpec(
        launcher="deepspeed",
        argv=("deepspeed", "train.py"),
        cwd="/job",
        script="train.py",
        nproc_per_node=world_size,
        world_size_origin=Origin("command line", "--num_gpus"),
    )
    origins = {
        "model.source": Origin("train.py", "--model_name_or_path"),
        "model.config": Origin("llama-8b/config.json"),
        "strategy": Origin("ds_config.json", "zero_optimization"),
        "zero.stage": Origin("ds_config.json", "zero_optimization.stage"),
        "micro_batch_size": Origin("train.py", "--per_device_train_batch_size"),
        "seq_len": Origin("default of launchguard", "seq_len"),
        "max_grad_norm": Origin("default of transformers 5.24.0", "max_grad_norm"),
    }
    return JobSpec(
        launch=launch,
        model=ModelSpec("llama-8b", config={"hidden_size": 4096}),
        strategy="zero",
        zero=ZeroSpec(stage=1),
        micro_batch_size=4,
        seq_len=4096,
        headroom=headroom,
        origins=origins,
    )


def rank(ranks: tuple[int, ...], peak: float, oom: OutOfMemory | None = None) -> RankPrediction:
    phases = (
        PhaseBytes("load", "", size(15.0), size(15.1), size(16.4)),
        PhaseBytes("forward", "model.layers.31", size(peak - 8), size(peak - 6), size(peak - 4.7)),
        PhaseBytes("backward", "model.layers.31", size(peak - 3.5), size(peak - 1.3), size(peak)),
        PhaseBytes("first step", "", size(peak - 20), size(peak - 1.3), size(peak)),
    )
    breakdown = {
        "parameters": size(14.9),
        "gradients": size(14.9),
        "optimizer_states": size(11.2),
        "activations": size(peak - 48.5),
        "communication": size(1.9),
        "temporaries": size(2.0),
    }
    breakdown["overhead"] = size(peak) - sum(breakdown.values())
    timeline = MemoryTimeline(
        (), size(peak - 3.5), size(peak - 1.3), "backward", "model.layers.31", {(Category.PARAMETERS, "weight"): size(14.9)}, oom
    )
    return RankPrediction(ranks, timeline, phases, phases[2], breakdown, oom)


def verdict(kind: str, ranks: tuple[RankPrediction, ...], the_job: JobSpec | None = None) -> Verdict:
    worst = max((r.peak.device_bytes for r in ranks), default=0)
    return Verdict(
        verdict=kind,
        job=the_job or job(),
        device=DeviceBudget("H100-80GB", size(79.1), size(7.91), size(79.1) - size(7.91), "profiles/devices/h100-80-sxm.yaml"),
        ranks=ranks,
        host=(HostPrediction(0, size(120.5), "load", size(1024), {"model on CPU": size(120.5)}),),
        causes=(),
        confidence=Confidence("high"),
        interval=interval_of(int(worst * 0.96), int(worst * 0.98), (size(0.4), size(0.8)), ()),
        notes=(),
        timing_seconds={"trace": 1.25, "replay": 0.08},
    )


def exceeding() -> tuple[Verdict, list[Advice]]:
    oom = OutOfMemory("backward", "model.layers.12", "mlp.down_proj", size(0.5), size(69.8), size(70.9))
    causes = (
        Cause("activations", "activations are kept for 32 layers", size(41.2), "train.py --gradient_checkpointing not given"),
        Cause(
            "optimizer_states", "optimizer states are replicated", size(29.9), "ds_config.json:zero_optimization.stage = 1",
            (Cause("optimizer_states", "exp_avg", size(14.95), ""), Cause("optimizer_states", "exp_avg_sq", size(14.95), "")),
        ),
    )  # fmt: skip
    advice = [
        Advice(
            "checkpoint_activations", "enable activation checkpointing",
            (Change("train args", "--gradient_checkpointing", None, True),), size(48.0), True, "safe", "about 1.3x compute",
        ),
        Advice(
            "raise_zero_stage", "zero_optimization.stage 1 -> 3",
            (Change("ds_config.json", "zero_optimization.stage", 1, 3),), size(74.3), False, "safe", "more communication",
        ),
        Advice(
            "shrink_micro_batch", "halve the micro-batch",
            (Change("train args", "--per_device_train_batch_size", 4, 2), Change("train args", "--gradient_accumulation_steps", 1, 2)),
            size(66.0), True, "review", "",
        ),
    ]  # fmt: skip
    notes = (
        Note(
            "LG305", "warning", "activation_checkpointing has no effect on a transformers model", "ds_config.json:activation_checkpointing"
        ),
        Note("LG201", "info", "read past 'env', which does not change what is launched"),
    )
    ranks = (rank((0, 1, 2, 3), 86.4, oom), rank((4, 5, 6), 86.4, oom), rank((7,), 85.1))
    return dataclasses.replace(verdict("exceeds", ranks), causes=causes, notes=notes), advice


def fitting() -> tuple[Verdict, list[Advice]]:
    low = Confidence("medium", ("torch.compile is not modelled", "NCCL bytes are the rule's, not measured"))
    return dataclasses.replace(verdict("fits", (rank(tuple(range(8)), 61.7),)), confidence=low), []


def unknown() -> tuple[Verdict, list[Advice]]:
    reason = Confidence("low", ("the model cannot be traced: nonzero() at model.py line 31",))
    return dataclasses.replace(verdict("unknown", ()), confidence=reason, host=()), []


def host_exceeding() -> tuple[Verdict, list[Advice]]:
    whole = verdict("exceeds", (rank((0,), 61.7),), job(world_size=1, headroom="6GiB"))
    host = (HostPrediction(0, size(1200.0), "load", size(1024), {"model on CPU": size(1200.0)}),)
    device = dataclasses.replace(whole.device, headroom_bytes=size(6), budget_bytes=size(73.1))
    return dataclasses.replace(whole, host=host, device=device), []
