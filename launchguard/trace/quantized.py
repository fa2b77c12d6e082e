"""Frozen quantised weights (bitsandbytes NF4, FP4 and int8; GPTQ int4): what they store, and the full weights that a product makes.

Modules of the libraries' own class names replace nn.Linear, and a stand-in for the package is shown to PEFT, so that PEFT's real adapter
layers for quantised weights run. Read in bitsandbytes 0.50.2 autograd/_functions.py (MatMul4Bit, MatMul8bitLt), functional.py
(quantize_4bit, quantize_blockwise, dequantize_4bit), backends/ (gemm_4bit, int8_scaled_mm), nn/modules.py; transformers 5.24
integrations/bitsandbytes.py (what is left unconverted). tests/conformance/test_quantisation.py compares with the real layers.
gemm_4bit's fused kernel for few tokens, which makes no weight, is not modelled: the prediction is then too high by one weight.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

from launchguard.errors import Unpredictable
from launchguard.installed import release
from launchguard.units import ceil_div

NOT_CONVERTED = ("lm_head", "embed_out", "score", "classifier")
BLOCK, NESTED_BLOCK = 64, 256  # elements per scale, scales per second-level scale
KEEPS_NO_INPUT = (0, 43, 2)  # of bitsandbytes; before, MatMul4Bit.forward has ctx.tensors = (A, B) (wheels of 0.41.1 to 0.43.2 read)
GPTQ_GROUP = 128


class Params4bit(torch.nn.Parameter):
    """Two weights in a byte; PEFT and transformers know the class by its name."""

    compress_statistics: bool
    quant_type: str


class Int8Params(torch.nn.Parameter):
    """One byte a weight."""


class _DequantisedProduct(torch.autograd.Function):
    """y = x W^T with W made from its packed form for the duration of the product, and again for the gradient of x. W is not kept; x only
    by older bitsandbytes (KEEPS_NO_INPUT), on the context: until the graph goes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.kept = layer, x if layer.keeps_input and ctx.needs_input_grad[0] else None
        scales = layer.first_scales(in_place=False)
        y = torch.nn.functional.linear(x, layer.dequantised(x, layer.forward_dtype or x.dtype), bias)
        del scales
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.matmul(grad, ctx.layer.dequantised_again(grad)) if ctx.needs_input_grad[0] else None, None, None


class _Quantised(torch.nn.Linear):
    """A Linear without its weight: subclasses store it packed and say in which dtype it comes back."""

    stored_dtype: torch.dtype
    compute_dtype: torch.dtype | None
    forward_dtype: torch.dtype | None = None  # in which forward makes the weight; None: in that of its input
    keeps_input = False

    def __init__(self, linear: torch.nn.Linear, stored_dtype: torch.dtype, compute_dtype: torch.dtype | None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        self.stored_dtype, self.compute_dtype = stored_dtype, compute_dtype

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)

    def first_scales(self, in_place: bool) -> torch.Tensor | None:
        """Scales that have to be made before the weight; None when they are stored as they are used."""
        return None

    def dequantised(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight, made in `dtype` and cast to that of the product."""
        return torch.empty((self.out_features, self.in_features), dtype=dtype, device=like.device).to(like.dtype)

    def dequantised_again(self, like: torch.Tensor) -> torch.Tensor:
        """For backward: in the dtype that it was quantised from, and cast; the scales do not outlive it (dequantize_4bit)."""
        scales = self.first_scales(in_place=True)
        weight = torch.empty((self.out_features, self.in_features), dtype=self.stored_dtype, device=like.device)
        del scales
        return weight.to(like.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _DequantisedProduct.apply(x, self, bias).to(given)


class Linear4bit(_Quantised):
    """bitsandbytes NF4 or FP4. Under FSDP the packed bytes are viewed in the storage dtype; scales are never sharded."""

    def __init__(self, linear: torch.nn.Linear, kind: str, nested: bool, storage: torch.dtype, compute: torch.dtype) -> None:
        super().__init__(linear, linear.weight.dtype, compute)
        n = linear.weight.numel()
        packed = torch.empty((ceil_div(n, 2 * storage.itemsize), 1), dtype=storage, device="meta")
        self.weight = Params4bit(packed, requires_grad=False)
        self.weight.compress_statistics, self.weight.quant_type = nested, kind
        blocks = ceil_div(n, BLOCK)
        self.buffer("absmax", (blocks,), torch.uint8 if nested else torch.float32)
        self.buffer("quant_map", (16,), torch.float32)
        if nested:
            self.buffer("nested_absmax", (ceil_div(blocks, NESTED_BLOCK),), torch.float32)
            self.buffer("nested_offset", (), torch.float32)
            self.buffer("nested_quant_map", (256,), torch.float32)  # a copy for every weight (quantize_blockwise)

    def first_scales(self, in_place: bool) -> torch.Tensor | None:
        """Double quantisation: the first scales in float32, to which the offset is added."""
        if self.absmax.dtype is torch.float32:
            return None
        scales = torch.empty(self.absmax.shape, dtype=torch.float32, device=self.absmax.device)
        return scales.add_(self.nested_offset) if in_place else scales + self.nested_offset


class Linear8bitLt(_Quantised):
    """bitsandbytes int8: a byte a weight, one scale a row; the product quantises its input as well and casts an int32 result back."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear, torch.float16, None)
        self.weight = Int8Params(torch.empty(linear.weight.shape, dtype=torch.int8, device="meta"), requires_grad=False)
        self.state = types.SimpleNamespace(has_fp16_weights=False, threshold=6.0, use_pool=False)
        self.index = None
        self.buffer("SCB", (self.out_features,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Int8Product.apply(x, self, self.bias)


class _Int8Product(torch.autograd.Function):
    """The input is quantised row by row, after a look for outliers (none are found in a fake tensor); it is kept for backward, which does
    not need it, on the context: until the graph goes. The weight comes back in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Linear8bitLt, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.kept = layer, x if ctx.needs_input_grad[0] else None
        quantised, scales = _quantised_rows(x.reshape(-1, x.shape[-1]).to(torch.float16))
        product = torch.empty((quantised.shape[0], layer.out_features), dtype=torch.int32, device=x.device)
        out = torch.empty(product.shape, dtype=torch.float16, device=x.device).to(x.dtype)
        del quantised, scales, product
        return out.reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.matmul(grad, ctx.layer.dequantised(grad, grad.dtype)), None, None


def _quantised_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.empty((rows.shape[0],), dtype=torch.float32, device=rows.device)
    quantised = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    outliers = rows.abs() >= 6.0  # llm_int8_threshold
    del outliers
    return quantised, scales


class GPTQLinear(_Quantised):
    """GPTQ int4, groups of 128: packed int32 weights and zeros, half-precision scales, an index of groups."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear, torch.float16, None)
        self.forward_dtype = torch.float16
        i, o = self.in_features, self.out_features
        self.weight = Params4bit(torch.empty((ceil_div(i, 8), o), dtype=torch.int32, device="meta"), requires_grad=False)
        groups = ceil_div(i, GPTQ_GROUP)
        self.buffer("qzeros", (groups, ceil_div(o, 8)), torch.int32)
        self.buffer("group_scales", (groups, o), torch.float16)
        self.buffer("g_idx", (i,), torch.int32)


def quantize(model: torch.nn.Module, quantization: dict[str, Any], bitsandbytes: str | None) -> None:
    """Replace every Linear but the heads, in place. quantization: a QuantizationSpec as a dictionary; bitsandbytes: the job's version,
    None: not known, taken to be recent. Raises Unpredictable for a method that is not known."""
    method = quantization["method"]
    if method not in ("nf4", "fp4", "int8", "gptq4"):
        raise Unpredictable(f"quantisation {method!r} is not modelled", help="known: nf4, fp4, int8, gptq4")
    _show_stand_in()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and not isinstance(child, _Quantised) and name not in NOT_CONVERTED:
                setattr(parent, name, _quantised(child, quantization))
    if bitsandbytes is not None and release(bitsandbytes, 3) < KEEPS_NO_INPUT:
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.keeps_input = True
    holder: Any = model
    if method == "gptq4":
        holder.quantization_method = "gptq"
    elif method == "int8":
        holder.is_loaded_in_8bit = True
    else:
        holder.is_loaded_in_4bit = True


def _quantised(linear: torch.nn.Linear, quantization: dict[str, Any]) -> torch.nn.Module:
    method = quantization["method"]
    if method == "int8":
        return Linear8bitLt(linear)
    if method == "gptq4":
        return GPTQLinear(linear)
    storage = getattr(torch, quantization.get("quant_storage") or "uint8")
    return Linear4bit(linear, method, bool(quantization["double_quant"]), storage, getattr(torch, quantization["compute_dtype"]))


def _show_stand_in() -> None:
    """PEFT asks bitsandbytes for its classes and injects the matching adapter layer. This process shows it the ones above."""
    from peft import import_utils

    package, nn, functional = (types.ModuleType(n) for n in ("bitsandbytes", "bitsandbytes.nn", "bitsandbytes.functional"))
    for module in (package, nn, functional):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    for cls in (Linear4bit, Linear8bitLt, Params4bit, Int8Params):
        setattr(nn, cls.__name__, cls)
    package.nn, package.functional = nn, functional  # type: ignore[attr-defined]
    for check in (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available):
        getattr(check, "cache_clear", lambda: None)()
