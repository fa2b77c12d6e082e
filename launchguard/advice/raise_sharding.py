"""Shard more of the training state: a higher ZeRO stage, full FSDP sharding, FSDP2 instead of DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from launchguard.job import FsdpSpec, JobSpec

CODE = "LG402"
SAFETY = "safe"
COST = "more communication"


def applies(job: JobSpec) -> bool:
    if job.world_size == 1:
        return False
    if job.strategy == "zero":
        return job.zero is not None and job.zero.stage < 3
    if job.strategy == "fsdp1":
        return job.fsdp is not None and job.fsdp.sharding_strategy != "FULL_SHARD"
    if job.strategy == "fsdp2":
        return job.fsdp is not None and job.fsdp.reshard_after_forward is not True
    return job.strategy == "ddp" and job.loop in ("trainer", "sft", "accelerate") and job.quantization is None


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    if job.strategy == "zero" and job.zero is not None:
        for stage in range(job.zero.stage + 1, 4):
            changes: dict[str, Any] = {"zero.stage": stage}
            if stage == 3:
                changes["zero.zero_init"] = job.loop in ("trainer", "sft", "dpo", "accelerate")
            yield f"zero_optimization.stage {job.zero.stage} -> {stage}", changes
    elif job.strategy == "fsdp1" and job.fsdp is not None:
        yield f"sharding strategy {job.fsdp.sharding_strategy} -> FULL_SHARD", {"fsdp.sharding_strategy": "FULL_SHARD"}
    elif job.strategy == "fsdp2" and job.fsdp is not None:
        yield f"reshard_after_forward {str(job.fsdp.reshard_after_forward).lower()} -> true", {"fsdp.reshard_after_forward": True}
    else:
        yield "shard with FSDP2 instead of DDP", _fsdp2(job)


def _fsdp2(job: JobSpec) -> dict[str, Any]:
    """Accelerate's FSDP2 with its defaults: float32 shards of what is trained, compute and reduction in the mixed precision dtype."""
    p = job.precision
    mixed = p.autocast or p.compute
    precision = dataclasses.replace(
        p, storage="float32" if p.autocast else p.storage, compute=mixed, reduce=mixed, autocast=None, float32_outputs=False
    )
    return {
        "strategy": "fsdp2",
        "fsdp": FsdpSpec(version=2, wrap_policy="TRANSFORMER_BASED_WRAP", accelerate_grouping=True),
        "ddp": None,
        "precision": precision,
    }
