"""Fewer samples at once, more accumulation: the global batch stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launchguard.job import JobSpec

CODE = "LG403"
SAFETY = "safe"
COST = "more steps of accumulation"


def applies(job: JobSpec) -> bool:
    return job.micro_batch_size > 1


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every smaller divisor of the micro-batch, largest first, with the accumulation that keeps the product."""
    size, steps = job.micro_batch_size, job.gradient_accumulation_steps
    for smaller in (n for n in range(size - 1, 0, -1) if size % n == 0):
        accumulation = steps * (size // smaller)
        yield (
            f"micro-batch {size} -> {smaller}, accumulation {steps} -> {accumulation}",
            {"micro_batch_size": smaller, "gradient_accumulation_steps": accumulation},
        )
