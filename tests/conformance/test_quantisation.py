"""trace/quantized.py against bitsandbytes' own layers: what they store, and what forward and backward hold beside it.

bitsandbytes runs here without a GPU. Where its CUDA backend takes the same Python path as its default one (gemm_4bit past a few tokens:
make the weight, then F.linear; int8_scaled_mm: product, then dequantisation) that path is put in for the CPU kernels, which work
differently. No input has outliers here, as none has in a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")
from live_bytes import Live  # noqa: E402

from launchguard.trace import quantized  # noqa: E402

SHAPES = [(100, 77), (640, 256), (256, 2048)]
TOKENS = 96
LIMIT = "stored 0 B, peaks 64 B"


def spec(method: str, nested: bool, storage: str = "uint8") -> dict[str, Any]:
    return {"method": method, "double_quant": nested, "compute_dtype": "bfloat16", "quant_storage": storage}


def real_layer(linear: Any, spec: dict[str, Any]) -> Any:
    """The layer as transformers makes it of a linear one, quantised on the CPU."""
    n_in, n_out = linear.in_features, linear.out_features
    if spec["method"] == "int8":
        layer = bnb.nn.Linear8bitLt(n_in, n_out, bias=linear.bias is not None, has_fp16_weights=False, threshold=6.0)
    else:
        storage = getattr(torch, spec["quant_storage"])
        how = {
            "quant_type": spec["method"],
            "compress_statistics": spec["double_quant"],
            "quant_storage": storage,
        }
        layer = bnb.nn.Linear4bit(n_in, n_out, bias=linear.bias is not None, compute_dtype=torch.bfloat16, **how)
    cls = bnb.nn.Int8Params if spec["method"] == "int8" else bnb.nn.Params4bit
    layer.weight = cls(linear.weight.data.clone(), requires_grad=False, **{k: v for k, v in vars(layer.weight).items() if k in (
        "has_fp16_weights", "quant_type", "compress_statistics", "quant_storage", "blocksize")})  # fmt: skip
    layer.bias = linear.bias
    layer = layer.to("cpu")
    layer.weight.requires_grad_(False)
    return layer


def our_layer(linear: Any, spec: dict[str, Any]) -> Any:
    layer = quantized._quantised(linear, spec)
    for name, p in list(layer._parameters.items()):
        if p is not None and p.device.type == "meta":
            layer._parameters[name] = torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=False)
    for name, b in list(layer._buffers.items()):
        layer._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
    return layer


def stored(value: Any) -> int:
    """Bytes of all tensors in a quantisation state."""
    found = [v for v in vars(value).values() if isinstance(v, torch.Tensor)]
    nested = [v for v in vars(value).values() if isinstance(v, bnb.functional.QuantState)]
    return sum(t.untyped_storage().nbytes() for t in found) + sum(map(stored, nested))


CASES = [spec(m, n, s) for m in ("nf4", "fp4") for n in (False, True) for s in ("uint8", "bfloat16")] + [spec("int8", False)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['method']}-{'double' if c['double_quant'] else 'single'}-{c['quant_storage']}")
def test_storage(case: dict[str, Any], shape: tuple[int, int], residuals: list[Any]) -> None:
    linear = torch.nn.Linear(*shape, bias=False, dtype=torch.bfloat16)
    ours, real = our_layer(linear, case), real_layer(linear, case)
    predicted = sum(t.untyped_storage().nbytes() for t in (*ours.parameters(), *ours.buffers()))
    if case["method"] == "int8":
        measured = real.weight.CB.untyped_storage().nbytes() + real.weight.SCB.untyped_storage().nbytes()
    else:
        measured = real.weight.untyped_storage().nbytes() + stored(real.weight.quant_state)
        assert tuple(real.weight.shape) == tuple(ours.weight.shape) and real.weight.dtype == ours.weight.dtype
    residuals.append(
        (f"bitsandbytes {case['method']} {case['double_quant']} {case['quant_storage']}", str(shape), "stored", predicted, measured)
    )
    assert predicted == measured


@pytest.fixture
def cuda_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """gemm_4bit, int8_mixed_scaled_mm and int8_vectorwise_quant as their CUDA backends compose them (backends/cuda/ops.py)."""
    from bitsandbytes.autograd import _functions
    from bitsandbytes.backends.default import ops

    def int8_mixed_scaled_mm(a: Any, ca: Any, cb: Any, sca: Any, scb: Any, outliers: Any = None, bias: Any = None) -> Any:
        product = torch.ops.bitsandbytes.int8_linear_matmul.default(ca, cb)
        out = torch.empty_like(product, dtype=torch.float16)
        return out.to(a.dtype), torch.empty(0, dtype=a.dtype)

    def int8_vectorwise_quant(a: Any, threshold: float = 0.0) -> Any:
        stats, rows = torch.empty(a.shape[0], dtype=torch.float32), torch.empty(a.shape, dtype=torch.int8)
        outliers = a.abs() >= threshold
        assert outliers.shape == a.shape
        return rows, stats, torch.empty(0, dtype=torch.int64)

    monkeypatch.setattr(_functions, "MatMul8bitFp", _functions.MatMul8bitLt)  # the CPU's own way without int8 products
    monkeypatch.setattr(torch.ops.bitsandbytes.int8_vectorwise_quant, "default", int8_vectorwise_quant)
    monkeypatch.setattr(torch.ops.bitsandbytes.gemm_4bit, "default", ops._gemm_4bit_default_impl)
    monkeypatch.setattr(torch.ops.bitsandbytes, "int8_mixed_scaled_mm", int8_mixed_scaled_mm)


def measured(layer: Callable[..., Any], width: int, dtype: str) -> dict[str, int]:
    """Peaks of forward and backward, and what forward keeps beside its output."""
    x = torch.randn(2, TOKENS // 2, width, dtype=getattr(torch, dtype), requires_grad=True)
    with Live() as forward:
        y = layer(x * 1)  # an input that nobody else holds: kept only if the layer keeps it
    kept = forward.live - y.untyped_storage().nbytes()
    grad = torch.ones_like(y)
    with Live() as backward:
        y.backward(grad)
    return {"forward peak": forward.peak, "kept": kept, "backward peak": backward.peak}


@pytest.mark.usefixtures("cuda_paths")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c["quant_storage"] == "uint8"], ids=lambda c: f"{c['method']}-{c['double_quant']}")
def test_forward_and_backward(case: dict[str, Any], shape: tuple[int, int], dtype: str, residuals: list[Any]) -> None:
    """To 64 bytes: scalars."""
    linear = torch.nn.Linear(*shape, bias=False, dtype=torch.bfloat16)
    ours, theirs = measured(our_layer(linear, case), shape[0], dtype), measured(real_layer(linear, case), shape[0], dtype)
    for quantity, real in theirs.items():
        residuals.append((f"bitsandbytes {case['method']} {case['double_quant']}", f"{shape} {dtype}", quantity, ours[quantity], real))
    assert {k: v for k, v in ours.items() if abs(v - theirs[k]) > 64} == {}, theirs
