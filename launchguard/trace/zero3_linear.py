"""What torch.nn.functional.linear is under ZeRO-3 (deepspeed 0.19.8 runtime/zero/linear.py:LinearFunctionForZeroStage3): it saves its
input as it comes and the parameter itself. Within an autocast region that matters: torch's own linear saves casts of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from launchguard.trace.cuda_semantics import DEVICE


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.autocast = torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        to_x = to_weight = to_bias = None
        with torch.autocast(DEVICE, dtype=dtype, enabled=enabled):
            rows = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                to_x = grad.matmul(weight)
            if ctx.needs_input_grad[1]:
                to_weight = rows.t().matmul(x.reshape(-1, x.shape[-1]))
            if bias is not None and ctx.needs_input_grad[2]:
                to_bias = rows.sum(0)
        return to_x, to_weight, to_bias


@contextlib.contextmanager
def zero3_linear(enabled: bool) -> Iterator[None]:
    """Within it every linear layer is DeepSpeed's."""
    original = torch.nn.functional.linear
    if enabled:
        torch.nn.functional.linear = lambda x, weight, bias=None: _Linear.apply(x, weight, bias)
    try:
        yield
    finally:
        torch.nn.functional.linear = original
