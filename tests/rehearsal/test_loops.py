"""A loop of the user's own, predicted and rehearsed, phase by phase: its outputs live until the next forward has made new ones, and on
a card without bfloat16 flash kernels attention works in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Rehearsed

SCALARS = 64 * 1024  # a handful of one-element tensors and the loop's batch
BLOCK = 2 << 20  # two large blocks given whole, where less than 1 MiB of each would be left: a matter of what was freed before


@pytest.mark.parametrize("card", ["a100-80-sxm", "t4"])
def test_phases(both: Callable[..., tuple[Rehearsed, Rehearsed]], card: str) -> None:
    command = ["python", "loop.py", "--model_name_or_path", "tiny-llama", "--batch_size", "4", "--seq_len", "512"]
    check, run = both(command, device=card, seq_len=512, options=("--steps", "3"))
    for phase in ("forward_1", "backward_1", "forward_2", "backward_2"):
        ours, real = (side.phases()[phase]["allocated_bytes"] for side in (check, run))
        assert abs(ours - real) <= (SCALARS if phase.endswith("_1") else BLOCK), (phase, ours, real)
