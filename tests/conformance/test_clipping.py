"""strategies/optimizer_step.py:clip_grad_norm against what torch's clip_grad_norm_ and Accelerate's hold on top of the gradients.

Bytes as the CUDA allocator counts them (512 to a block). Partial sums of CUDA's _foreach_norm kernel, 20 KiB of the rule, are not on the
CPU: those are taken off.
"""

from __future__ import annotations

from typing import Any

import pytest

from launchguard.events import Op
from launchguard.strategies._stream import Stream
from launchguard.strategies.optimizer_step import clip_grad_norm

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")
from live_bytes import Live  # noqa: E402

LIMIT = "4096 B"
BLOCK, PARTIAL_SUMS = 512, 20 * 1024
COUNTS = [1, 8, 200]


class Blocks(Live):
    """Every storage takes whole blocks."""

    block = BLOCK


def real(how: str, count: int) -> int:
    params = [torch.nn.Parameter(torch.zeros(16, 16)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    with Blocks() as books:
        if how == "accelerate":
            accelerator.clip_grad_norm_(params, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=how == "foreach")
    return books.peak


def predicted(count: int) -> int:
    stream = Stream()
    clip_grad_norm(stream, count)
    return sum(e.nbytes for e in stream.events if e.op is Op.ALLOC) - PARTIAL_SUMS


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("how", ["foreach", "accelerate"])
def test_clip_grad_norm(how: str, count: int, residuals: list[Any]) -> None:
    ours, theirs = predicted(count), real(how, count)
    residuals.append((f"clip_grad_norm_ {how}", f"{count} tensors", "peak", ours, theirs))
    assert abs(ours - theirs) <= 4096
