"""Let every rank write its own part of a checkpoint instead of gathering all of it on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launchguard.job import JobSpec

CODE = "LG406"
SAFETY = "safe"
PHASES = ("save",)
COST = "checkpoints need merging before other tools read them"


def applies(job: JobSpec) -> bool:
    full = job.fsdp is not None and job.fsdp.state_dict_type == "FULL_STATE_DICT"
    return (
        job.saving is not None
        and job.saving.library
        and job.saving.script != "device"
        and full
        and job.strategy in ("fsdp1", "fsdp2")
        and job.world_size > 1
    )


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "save a sharded state dict", {"fsdp.state_dict_type": "SHARDED_STATE_DICT"}
