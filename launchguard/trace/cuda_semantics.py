"""CUDA's choices, imposed on a trace that runs without CUDA.

A Python PrivateUse1 backend ("simgpu") gives autograd a device that any torch build accepts (fake cuda aborts the process on a CPU
build). On it this module installs what differs from CUDA: autocast's op lists, the attention kernel, fused element-wise kernels, and
a table of bytes that ops hold only while they run. Private torch API is used, so this runs in a process of its own.

Sources: torch 2.13 ATen/autocast_mode.h (lists), sdp_utils.cpp (kernel choice, read off the real binary with a virtual card),
native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, attention_backward.cu (workspaces).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import backend_registration

from launchguard.units import MIB, ceil_div, round_up

aten = torch.ops.aten
DEVICE = "simgpu"
Blocks = tuple["int | tuple[int, ...]", ...]

# ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32 of CUDA, as far as PrivateUse1 lets Python register them
LOWER_PRECISION = (
    "matmul mm bmm addmm baddbmm addbmm addmv addr mv linear einsum chain_matmul linalg_multi_dot conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution _convolution prelu _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell "
    "gru_cell rnn_tanh_cell rnn_relu_cell _grouped_mm"
).split()  # fmt: skip
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar "
    "softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm.dim nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp norm.Scalar norm.ScalarOpt_dim"
).split()  # fmt: skip
FLOAT32_SET_OPT_DTYPE = "prod softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList".split()


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of an accelerator module."""

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *args: Any) -> None: ...

    def current_device(self) -> int:
        return 0

    def device(self, *args: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Card:
    """What host code reads of the device, and the torch that will run on it.
    compute_capability: (major, minor); sms; max_threads_per_sm; torch: (major, minor) of the job's torch."""

    compute_capability: tuple[int, int]
    sms: int
    max_threads_per_sm: int
    torch: tuple[int, ...]

    @property
    def has_flash(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def prefers_cudnn_attention(self) -> bool:
        """cuDNN first on Hopper and data-centre Blackwell (cuDNN > 9.15)."""
        return self.compute_capability[0] in (9, 10)


class Semantics:
    """Installs the backend once per process; `kernels` collects the attention kernels that were chosen."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.kernels: set[str] = set()
        self._weight_casts: dict[int, torch.Tensor] = {}
        self._libraries: list[torch.library.Library] = []
        self._sdpa = torch.nn.functional.scaled_dot_product_attention
        self._tensor = torch.tensor

    def install(self) -> None:
        backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=_Backend())
        torch.autograd.set_multithreading_enabled(False)
        self._install_autocast()
        self._install_kernels()
        torch.nn.functional.scaled_dot_product_attention = self.attention
        torch.tensor = self._device_tensor
        torch.nn.functional.rms_norm = self._rms_norm
        torch.nn.functional.softmax = self._half_to_float(torch.nn.functional.softmax, aten._softmax)
        torch.nn.functional.log_softmax = self._half_to_float(torch.nn.functional.log_softmax, aten._log_softmax)
        torch.clear_autocast_cache = self._clear_autocast_cache(torch.clear_autocast_cache)
        torch.is_autocast_enabled = _of_the_card(torch.is_autocast_enabled)
        torch.Tensor.__getitem__ = _tensor_indices(torch.Tensor.__getitem__)
        torch.Tensor.all = torch.all = _all_true(torch.Tensor.all)

    # ------------------------------------------------------------------------------------------------ autocast
    def _install_autocast(self) -> None:
        fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
        fallback.fallback(torch.library.fallthrough_kernel)
        library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
        self._libraries += [fallback, library]
        for names, rule in ((LOWER_PRECISION, self._lower), (FLOAT32, self._float32), (FLOAT32_SET_OPT_DTYPE, self._float32_dtype)):
            for name in names:
                base, _, overload = name.partition(".")
                op = getattr(getattr(aten, base, None), overload or "default", None)
                if op is not None:
                    with contextlib.suppress(RuntimeError):  # an op that this torch does not let Python register keeps its input dtype
                        library.impl(name, self._kernel(op, rule))

    @staticmethod
    def _kernel(op: Any, rule: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., Any]:
        exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(exclude):
                return rule(op, args, kwargs)

        return kernel

    def _cast(self, x: Any, dtype: torch.dtype, cache: bool) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(self._cast(y, dtype, cache) for y in x)
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.device.type != DEVICE or x.dtype in (dtype, torch.float64):
            return x
        if cache and x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view() and torch.is_autocast_cache_enabled():
            if id(x) not in self._weight_casts:
                self._weight_casts[id(x)] = x.to(dtype)
            return self._weight_casts[id(x)]
        return x.to(dtype)

    def _cast_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, cache: bool) -> Any:
        """Arguments from the last to the first, as gcc evaluates those of a C++ call: a weight is cast before its input, and in backward
        the input's gradient is cast back first (autocast_mode.h:WrapFunction_; seen in torch 2.14's own allocations)."""
        named = {k: self._cast(v, dtype, cache) for k, v in reversed(kwargs.items())}
        return [self._cast(x, dtype, cache) for x in reversed(args)][::-1], named

    def _lower(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast, named = self._cast_all(args, kwargs, torch.get_autocast_dtype(DEVICE), True)
        return op(*cast, **named)

    def _float32(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast, named = self._cast_all(args, kwargs, torch.float32, False)
        return op(*cast, **named)

    def _float32_dtype(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        explicit = kwargs.get("dtype") is not None or any(isinstance(x, torch.dtype) for x in args)
        if not explicit and args[0].dtype in (torch.bfloat16, torch.float16):
            kwargs = {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        """The autocast region around forward and loss. Leaving the outermost one (checkpointing enters one for every recomputed layer)
        drops the cached weight copies (torch/amp/autocast_mode.py)."""
        if dtype is None:
            yield
            return
        with torch.autocast(DEVICE, dtype=dtype):
            yield

    def _clear_autocast_cache(self, original: Callable[[], None]) -> Callable[[], None]:
        def clear() -> None:
            original()
            self._weight_casts.clear()

        return clear

    # ------------------------------------------------------------------------------------------------ kernels
    def _install_kernels(self) -> None:
        """Ops that CUDA runs in one kernel and PrivateUse1 would decompose: with a kernel of its own the op stays whole, and the
        fake mode above never calls it."""
        library = torch.library.Library("aten", "IMPL", "PrivateUse1")
        self._libraries.append(library)

        def unreachable(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("simgpu has no values")

        for name in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "mish_backward", "mm.out", "addmm.out", "bmm.out"):
            with contextlib.suppress(RuntimeError):
                library.impl(name, unreachable)

    def _device_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != DEVICE:
            return self._tensor(*args, **kwargs)
        del kwargs["device"]
        t = self._tensor(*args, **kwargs)
        return torch.empty(t.shape, dtype=t.dtype, device=DEVICE, requires_grad=t.requires_grad)

    def _rms_norm(
        self, x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if x.device.type == DEVICE and torch.is_autocast_enabled(DEVICE):
            x = self._cast(x, torch.float32, False)
            weight = self._cast(weight, torch.float32, False)
        if x.device.type == DEVICE and (weight is None or weight.dtype == x.dtype):
            return aten._fused_rms_norm(x, list(normalized_shape), weight, eps)[0]
        return torch.rms_norm(x, list(normalized_shape), weight, eps)

    @staticmethod
    def _half_to_float(original: Callable[..., torch.Tensor], fused: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """float16 scores with a float32 result: CUDA converts inside the kernel, of bfloat16 it makes a copy first
        (native/SoftMax.cpp:softmax, log_softmax)."""

        def softmax(
            input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
        ) -> torch.Tensor:  # fmt: skip
            if input.device.type == DEVICE and input.dtype == torch.float16 and dtype == torch.float32 and dim is not None:
                return fused(input, dim, True)
            return original(input, dim, _stacklevel, dtype)

        return softmax

    # ------------------------------------------------------------------------------------------------ attention
    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """F.scaled_dot_product_attention with the kernel that CUDA would take for this card, dtype, mask, dropout and head size."""
        if query.device.type != DEVICE:
            return self._sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled(DEVICE):
            dtype = torch.get_autocast_dtype(DEVICE)
            (query, key, value), _ = self._cast_all((query, key, value), {}, dtype, False)
        kernel = self.choose_attention(query, key, attn_mask, dropout_p)
        self.kernels.add(kernel)
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if kernel == "math":
            return self._math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        bias = self._bias(attn_mask, query, key)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))  # should_compute_logsumexp
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, differentiable, dropout_p, is_causal, False, scale=scale
            )[0]
        if key.shape[1] != query.shape[1]:
            return _GroupedEfficient.apply(query, key, value, self.card)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, differentiable, dropout_p, is_causal and bias is None, scale=scale
        )[0]

    def choose_attention(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> str:
        """ "flash" | "cudnn" | "efficient" | "math": the order of torch 2.13's sdp_utils.cpp on a card of this compute capability."""
        half = query.dtype in (torch.float16, torch.bfloat16)
        head, grouped = query.shape[-1], key.shape[1] != query.shape[1]
        if half and self.card.prefers_cudnn_attention and dropout_p == 0.0 and head <= 128 and head % 8 == 0:
            return "cudnn"
        if half and self.card.has_flash and mask is None and head <= 256:
            return "flash"
        if grouped and self.card.torch < (2, 14):  # from 2.14 on the memory-efficient kernel takes grouped queries
            return "math"
        if query.dtype == torch.bfloat16 and not self.card.has_flash:
            return "math"
        return "efficient"

    @staticmethod
    def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        elif mask.dtype != query.dtype:
            mask = mask.to(query.dtype)
        return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])

    def _math_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        with torch.autocast(DEVICE, enabled=False):  # what a cast operation calls is not cast again (ATen/autocast_mode.h:WrapFunction_)
            return aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]  # fmt: skip


class _GroupedEfficient(torch.autograd.Function):
    """The memory-efficient kernel with grouped queries (torch 2.14), which 2.13's meta function does not know: output and log-sum-exp are
    kept, dk and dv come back in the shape of k and v after being made for all query heads."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, card: Card) -> torch.Tensor:
        ctx.card = card
        b, h, s, _ = query.shape
        out = torch.empty((b, s, h, value.shape[-1]), dtype=query.dtype, device=query.device).transpose(1, 2)
        lse = torch.empty((b, h, round_up(s, 32)), dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        copies = [torch.empty(n, dtype=torch.uint8, device=grad.device) for n in _row_major_copies(grad)]
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        expanded = [torch.empty((*query.shape[:2], *t.shape[2:]), dtype=t.dtype, device=t.device) for t in (key, value)]
        held = []
        for block in _efficient_scratch(ctx.card, query, key.shape[2]):
            for nbytes in block if isinstance(block, tuple) else (block,):
                held.append(torch.empty(nbytes, dtype=torch.uint8, device=query.device))
            if isinstance(block, tuple):
                del held[-len(block) :]
        del copies, expanded, held
        return dq, dk, dv, None


def _tensor_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """x[..., [1, 2]]: C++ would move the list to the device as real values, below every mode; as a tensor it is moved like any other."""

    def getitem(self: torch.Tensor, index: Any) -> Any:
        if self.device.type == DEVICE and isinstance(index, (tuple, list)):
            parts = tuple(torch.tensor(i) if isinstance(i, list) else i for i in (index if isinstance(index, tuple) else (index,)))
            return original(self, parts)
        return original(self, index)

    return getitem


def _of_the_card(original: Callable[..., bool]) -> Callable[..., bool]:
    """torch.is_autocast_enabled() without a device asks about CUDA (torch 2.13 csrc/autograd/init.cpp), as PEFT's layers of bitsandbytes
    do before they cast an adapter's input."""

    def is_autocast_enabled(device: str = "cuda") -> bool:
        return original(DEVICE if device == "cuda" else device)

    return is_autocast_enabled


def _all_true(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.all of the whole tensor reads True: library code asks it of masks ("is nothing padded?"), and full batches answer yes."""

    def all_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        return True if self.device.type == DEVICE and not args and not kwargs else out

    return all_


# ---------------------------------------------------------------------------------------------------- bytes inside an op
def _reduction_scratch(card: Card, rows: int, columns: int) -> int:
    """Bytes that a sum over dim 0 of (rows, columns) holds for its partial sums (the bias gradient of every Linear).

    Formula fitted to the real kernel's launch heuristics, within a few percent for 460 of 495 shapes (allocator_overheads 4.3).
    """
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    threads = 512 // vector
    width = min(1 << (max(columns // vector, 1).bit_length() - 1), 32)
    height = threads // width
    per_column = ceil_div(rows, height)
    groups, target = ceil_div(columns, width * vector), card.sms * (card.max_threads_per_sm // (width * height))
    if per_column < 256 or groups > target:
        return 0
    blocks = max(min(ceil_div(target, groups), ceil_div(per_column, 16)), ceil_div(per_column, 256))
    return 4 * columns * width * vector * blocks


def _sum_dim(card: Card, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    x, dims = args[0], args[1] if len(args) > 1 else None
    if x.dim() < 2 or not dims or 0 not in [d % x.dim() for d in dims] or (x.dim() - 1) in [d % x.dim() for d in dims]:
        return ()
    columns = x.shape[-1]
    return (_reduction_scratch(card, x.numel() // max(columns, 1), columns),)


def _embedding_backward(card: Card, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, ...]:
    """EmbeddingBackwardKernel.cu: float32 partial rows of the sorted segments, 10 indices each; small batches take another kernel."""
    grad, indices, weights = args[0], args[1], args[2]
    n = indices.numel()
    if n <= 3072:
        return ()
    segments = min(n, weights)
    return ((n // 10 + segments) * grad.shape[-1] * 4 + 8 * (5 * n + 2 * segments),)


def _flash_backward(card: Card, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """FlashAttention-2 backward: softmax_d, the float32 accumulator of dq, and dk, dv expanded to all query heads (GQA)."""
    query, key = args[1], args[2]
    b, h, s, d = query.shape
    expanded = b * key.shape[2] * h * d * query.element_size() if key.shape[1] != h else 0
    scratch = (4 * b * h * round_up(s, 128), 4 * b * round_up(s, 128) * h * round_up(d, 32), expanded, expanded)
    return (*_row_major_copies(args[0], args[4]), *scratch)


def _row_major_copies(*tensors: torch.Tensor) -> tuple[int, ...]:
    """The kernels want (batch, seq, head, size) in this order in memory; the gradient or output of another layout is copied
    (attention_backward.cu:_flash_attention_backward, _efficient_attention_backward)."""
    return tuple(t.numel() * t.element_size() for t in tensors if not t.transpose(1, 2).is_contiguous())


def _cudnn_backward(card: Card, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """As much as FlashAttention's, in one workspace."""
    return (sum(_flash_backward(card, args, out)),)


def _efficient_forward(card: Card, args: tuple[Any, ...], out: Any) -> Blocks:
    """Heads of more than 128 do not fit in registers: half-precision output is summed up in float32 (kernel_forward.h:kKeepOutputInRF,
    kNeedsOutputAccumulatorBuffer)."""
    query = args[0]
    return (4 * query.numel(),) if query.dtype != torch.float32 and query.shape[-1] > 128 else ()


def _safe_softmax(card: Card, args: tuple[Any, ...], out: torch.Tensor) -> Blocks:
    """The math kernel's softmax asks which rows are masked altogether (native/transformers/attention.cpp:_safe_softmax)."""
    return args[0].numel(), args[0].numel() // max(args[0].shape[-1], 1)


def _efficient_backward(card: Card, args: tuple[Any, ...], out: Any) -> Blocks:
    return (*_row_major_copies(args[0]), *_efficient_scratch(card, args[1], args[2].shape[2]))


def _efficient_scratch(card: Card, query: torch.Tensor, keys: int) -> Blocks:
    """Memory-efficient backward: delta, which float32 inputs multiply out in full, and the kernel's workspace."""
    b, h, s, d = query.shape
    delta, workspace = 4 * b * h * s, 4 * b * h * _efficient_workspace(card, query, keys)
    return ((4 * b * h * s * d, delta, delta), delta, workspace) if query.dtype == torch.float32 else (delta, workspace)


def _efficient_workspace(card: Card, query: torch.Tensor, keys: int) -> int:
    """Floats for each head: tiles of dq, each with a lock of four words, and dk, dv of some tiles of keys where they are summed up
    elsewhere than in the output (mem_eff_attention/kernel_backward.h:workspace_elements_gq, _gk, _gv; attention_backward.cu: as many at a
    time as make 200 with the heads). Tiles by card, dtype and head size: read off the real binary on virtual cards of compute capability
    7.0 to 9.0 (tests/rehearsal/test_ops.py), equal for all 200 shapes asked."""
    (batch, heads, queries, head), half = query.shape, query.dtype != torch.float32
    large = card.compute_capability in ((8, 0), (9, 0), (10, 0))
    rows, key_rows, columns, sums = 64, 64, 64, False
    if half and head > 128:
        rows, sums = 128, True
    elif half and head > 96 and (8, 0) < card.compute_capability < (9, 0):
        sums = True
    elif head > 64 and (half or large):
        rows, columns = 128, 128 if half and large else 64
    elements = ceil_div(queries, rows) * ceil_div(head, columns) * (rows * columns + 4)
    at_a_time = max(1, min(ceil_div(keys, key_rows), 200 // (batch * heads)))
    return elements + (2 * at_a_time * key_rows * round_up(head, rows) if sums else 0)


def _logsumexp(card: Card, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, ...]:
    return args[0].numel() * args[0].element_size(), 3 * out.numel() * 4


def _softmax_backward(card: Card, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, ...]:
    """SoftMax.cu:softmax_backward_cuda_out multiplies gradient and output first."""
    return (args[0].numel() * args[0].element_size(),)


def _binary_cross_entropy(card: Card, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, ...]:
    """native/Loss.cpp:binary_cross_entropy_with_logits: log-sigmoid and one product beside the loss of every element."""
    return (args[0].numel() * args[0].element_size(),) * 2


def _index_backward(card: Card, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    indices = [x for x in args[1] if x is not None]
    n = max((x.numel() for x in indices), default=0)
    accumulate = len(args) > 3 and args[3]
    return (6 * 8 * n + 64 * 1024,) if accumulate else ()


def _sort(card: Card, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """1-D sorts hold about 20 bytes an element (cub double buffers), measured."""
    return (20 * args[0].numel(),) if args[0].dim() == 1 and args[0].numel() > MIB // 4 else ()


# op -> bytes of each block held while it runs, beyond its outputs; those of an inner tuple are given back before the next one comes
SCRATCH: dict[Any, Callable[[Card, tuple[Any, ...], Any], Blocks]] = {
    aten.sum.dim_IntList: _sum_dim,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._safe_softmax.default: _safe_softmax,
    aten.logsumexp.default: _logsumexp,
    aten.mean.dim: _sum_dim,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy,
    aten.index_put.default: _index_backward,
    aten.index_put_.default: _index_backward,
    aten.sort.default: _sort,
}
