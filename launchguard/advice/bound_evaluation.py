"""Move the predictions of an evaluation to the host as it goes, and evaluate fewer samples at once: the metrics stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launchguard.job import JobSpec

CODE = "LG405"
SAFETY = "safe"
PHASES = ("evaluation",)
COST = "slower evaluation"


def applies(job: JobSpec) -> bool:
    return job.evaluation is not None


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """First bound what is kept; then smaller batches, halved down to one sample."""
    spec = job.evaluation
    assert spec is not None
    changes: dict[str, Any] = {}
    if not spec.loss_only and not spec.per_batch and spec.accumulation_steps != 1:
        changes["evaluation.accumulation_steps"] = 1
        yield "eval_accumulation_steps 1", dict(changes)
    size = spec.batch_size
    while size > 1:
        size //= 2
        yield f"evaluation batch {spec.batch_size} -> {size}", {**changes, "evaluation.batch_size": size}
