"""launchguard's allocator against the one inside the CUDA build of torch, on a virtual card that is too small for the trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import ROOT, Rehearsed

CONFS = [
    "", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4", "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.7", "per_process_memory_fraction:0.7,expandable_segments:True",
]  # fmt: skip


@pytest.mark.parametrize("conf", CONFS)
def test_step_by_step(rehearse: Callable[..., Rehearsed], conf: str) -> None:
    """Segments, pools of three streams, splits, rounding, garbage collection, retries after release, refusals."""
    done = rehearse("--device", "4GiB", "--", "python", "allocator.py", env={"PYTHONPATH": str(ROOT), "PYTORCH_CUDA_ALLOC_CONF": conf})
    assert done.code == 0, done.out[:800] + done.err
