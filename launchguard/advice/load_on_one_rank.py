"""Let one rank of each node load the model and send it to the others, instead of every rank loading a copy into main memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launchguard.job import TRAINER_LOOPS, JobSpec

CODE = "LG407"
SAFETY = "safe"
PHASES = ("load",)
COST = "slower start"


def applies(job: JobSpec) -> bool:
    """Accelerate's and the Trainer's FSDP know how; a quantised model is loaded by every rank."""
    accelerated = job.loop in (*TRAINER_LOOPS, "accelerate") and job.strategy in ("fsdp1", "fsdp2")
    return accelerated and job.fsdp is not None and not job.fsdp.cpu_ram_efficient_loading and job.quantization is None


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    changes: dict[str, Any] = {"fsdp.cpu_ram_efficient_loading": True}
    if job.strategy == "fsdp1":
        changes["fsdp.sync_module_states"] = True
    yield "load the model on one rank of each node", changes
