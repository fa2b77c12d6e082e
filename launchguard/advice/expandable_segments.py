"""Let the allocator map pages on demand: what is cached in unusable pieces becomes usable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launchguard.job import JobSpec

CODE = "LG404"
SAFETY = "safe"
COST = "no known cost"


def applies(job: JobSpec) -> bool:
    return "expandable_segments" not in job.allocator_conf and "backend" not in job.allocator_conf


def apply(job: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    conf = ",".join(filter(None, (job.allocator_conf, "expandable_segments:True")))
    yield "let the allocator's segments grow", {"allocator_conf": conf}
