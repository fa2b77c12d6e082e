"""Keep only each layer's input and compute the rest again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launchguard.job import JobSpec

CODE = "LG401"
SAFETY = "safe"
COST = "about 1.3x compute"


def applies(job: JobSpec) -> bool:
    """Hugging Face models know how; a factory's module is wrapped layer by layer under FSDP."""
    return not job.activation_checkpointing.enabled and (job.model.config is not None or bool(job.fsdp and job.fsdp.wrap_classes))


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    changes: dict[str, Any] = {"activation_checkpointing.enabled": True}
    if job.strategy in ("fsdp1", "fsdp2"):
        changes |= {"activation_checkpointing.via": "fsdp", "activation_checkpointing.use_reentrant": False}
    yield "enable activation checkpointing", changes
