"""Large floating tensors on the host without their bytes: with weights that are nobody's, casts, clones and zeros need not write pages.

A fresh allocation is zero pages that cost nothing until somebody writes; an 8B model that is upcast on the CPU would write 32 GB of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

LARGE_BYTES = 1 << 20
PAGE = 4096
MADV_DONTNEED = 4  # sys/mman.h
_library: torch.library.Library | None = None
_libc = ctypes.CDLL(None)
_aten = torch.ops.aten
# these ops have one kernel for every backend (native_functions.yaml: CompositeExplicitAutograd); a backend without its own reaches it
_GENERIC = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)


def install() -> None:
    """Replace the CPU kernels of four ops. Small tensors, integers and other devices go the usual way."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for function in (_to_copy, clone, copy_, zero_):
        _library.impl(function.__name__, function, "CPU", allow_override=True)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() * tensor.element_size() >= LARGE_BYTES and tensor.layout is torch.strided


def _to_copy(tensor: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
             non_blocking: bool = False, memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    if not isinstance(tensor, torch.Tensor):  # `t == 3`: torch hands a wrapped number over as the number itself
        return torch.scalar_tensor(tensor, dtype=dtype, device=device)
    stays = device is None or torch.device(device).type == "cpu"
    if stays and _is_large(tensor) and not pin_memory and (dtype is None or dtype.is_floating_point):
        return torch.empty_like(tensor, dtype=dtype or tensor.dtype, memory_format=memory_format or torch.preserve_format)
    return _aten._to_copy.default.redispatch(_GENERIC, tensor, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory,
                                         non_blocking=non_blocking, memory_format=memory_format)  # fmt: skip


def clone(tensor: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    if _is_large(tensor):
        return torch.empty_like(tensor, memory_format=memory_format or torch.preserve_format)
    return _aten.clone.default.redispatch(_GENERIC, tensor, memory_format=memory_format)


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(source, torch.Tensor):
        return target.fill_(source)
    if source.device.type == "cpu" and _is_large(target) and _is_large(source):
        return target
    return _aten.copy_.default.redispatch(_GENERIC, target, source, non_blocking)


def zero_(tensor: torch.Tensor) -> torch.Tensor:
    """Whole pages go back to the kernel, which gives zeros when they are read; the ends are written."""
    if not (_is_large(tensor) and tensor.is_contiguous()):
        return tensor.fill_(0)
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first, last = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED):
        return tensor.fill_(0)
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, start + nbytes - last)
    return tensor
