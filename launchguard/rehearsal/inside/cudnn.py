"""cuDNN's entry points, and cuSOLVER's for GaLore: outputs of the right shape, unfilled, and no workspace; recurrent layers by torch's own
kernels.

The stub libraries return success and no plan, so torch's own code on top of them cannot run. Convolutions and singular values get a
workspace of 0 bytes, a lower bound; recurrent layers run as they do with cuDNN switched off. All are said in the record.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

_library: torch.library.Library | None = None
used: set[str] = set()  # "convolutions", "recurrent layers" ...: what the run went through that is not as on a real card


def install() -> None:
    """Replace the CUDA implementations that call cuDNN."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for function in (cudnn_convolution, cudnn_convolution_transpose, convolution_backward, _scaled_dot_product_cudnn_attention,
                     _scaled_dot_product_cudnn_attention_backward, cudnn_batch_norm, cudnn_batch_norm_backward, _linalg_svd):  # fmt: skip
        _library.impl(function.__name__, function, "CUDA", allow_override=True)
    _without_recurrent_kernels()


def _without_recurrent_kernels() -> None:
    """torch.nn.LSTM, GRU and RNN with cuDNN switched off while they run."""
    from torch.nn.modules import rnn

    def switched_off(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            used.add("recurrent layers")
            with torch.backends.cudnn.flags(enabled=False):
                return original(*args, **kwargs)

        return run

    rnn.RNNBase.flatten_parameters = lambda self: None
    for name in ("lstm", "gru"):
        setattr(rnn._VF, name, switched_off(getattr(rnn._VF, name)))
    for name, function in rnn._rnn_impls.items():
        rnn._rnn_impls[name] = switched_off(function)


def _convolved(
    x: Any, w: Any, padding: Any, stride: Any, dilation: Any, output_padding: Any, transposed: bool, groups: int
) -> torch.Tensor:
    used.add("convolutions")
    spatial = []
    for i in range(x.dim() - 2):
        reach = dilation[i] * (w.shape[2 + i] - 1)
        if transposed:
            spatial.append((x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + 1 + output_padding[i])
        else:
            spatial.append((x.shape[2 + i] + 2 * padding[i] - reach - 1) // stride[i] + 1)
    channels = w.shape[1] * groups if transposed else w.shape[0]
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty((x.shape[0], channels, *spatial), dtype=x.dtype, device=x.device, memory_format=layout)


def cudnn_convolution(x: Any, w: Any, padding: Any, stride: Any, dilation: Any, groups: int, benchmark: bool, deterministic: bool,
                      allow_tf32: bool) -> torch.Tensor:  # fmt: skip
    return _convolved(x, w, padding, stride, dilation, [0] * 3, False, groups)


def cudnn_convolution_transpose(x: Any, w: Any, padding: Any, output_padding: Any, stride: Any, dilation: Any, groups: int, benchmark: bool,
                                deterministic: bool, allow_tf32: bool) -> torch.Tensor:  # fmt: skip
    return _convolved(x, w, padding, stride, dilation, output_padding, True, groups)


def convolution_backward(g: Any, x: Any, w: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
                         output_padding: Any, groups: int, mask: Sequence[bool]) -> tuple[Any, Any, Any]:  # fmt: skip
    channels = w.shape[1] * groups if transposed else w.shape[0]
    bias = torch.empty(channels, dtype=w.dtype, device=w.device) if mask[2] else None
    return (torch.empty_like(x) if mask[0] else None, torch.empty_like(w) if mask[1] else None, bias)


def _scaled_dot_product_cudnn_attention(q: Any, k: Any, v: Any, bias: Any, compute_lse: bool, dropout_p: float = 0.0,
                                        is_causal: bool = False, return_debug_mask: bool = False, *,
                                        scale: Any = None) -> tuple[Any, ...]:  # fmt: skip
    used.add("attention by cuDNN")
    b, h, s, _ = q.shape
    # in q's own memory order, like the flash kernels: (B, S, H, D) storage when q is a transposed view
    shape = (b, s, h, v.shape[-1]) if q.transpose(1, 2).is_contiguous() else (b, h, s, v.shape[-1])
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    out = out.transpose(1, 2) if shape[1] == s and shape[2] == h and q.transpose(1, 2).is_contiguous() else out
    lse = torch.empty((b, h, s, 1) if compute_lse else (0,), dtype=torch.float32, device=q.device)
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    return out, lse, None, None, s, k.shape[2], seed, offset, torch.empty(0, dtype=q.dtype, device=q.device)


def _scaled_dot_product_cudnn_attention_backward(g: Any, q: Any, k: Any, v: Any, *rest: Any, scale: Any = None) -> tuple[Any, Any, Any]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def cudnn_batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> tuple[Any, ...]:
    used.add("batch norms")
    save = torch.empty(w.shape if training else (0,), dtype=torch.float32, device=x.device)
    return torch.empty_like(x), save, torch.empty_like(save), torch.empty(0, dtype=torch.uint8, device=x.device)


def cudnn_batch_norm_backward(x: Any, g: Any, w: Any, *rest: Any) -> tuple[Any, Any, Any]:
    return torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)


def _linalg_svd(a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> tuple[Any, ...]:
    """Results in Fortran's order (native/BatchLinearAlgebra.cpp:_linalg_svd)."""
    used.add("singular values")
    *batch, m, n = a.shape
    k = min(m, n)
    values = torch.empty((*batch, k), dtype=a.dtype.to_real(), device=a.device)
    if not compute_uv:
        return a.new_empty(0), values, a.new_empty(0)
    left, right = (m if full_matrices else k), (n if full_matrices else k)
    u, vh = a.new_empty((*batch, left, m)).mT, a.new_empty((*batch, n, right)).mT
    return u, values, vh
