"""Ops with forward and backward: bytes at the peak of each, on a (virtual) card or under launchguard's trace.

python ops.py trace MAJOR,MINOR SMS     prints {name: [forward, backward]}
python ops.py card                      fails with the pairs in KiB as its message: a rehearsal reports how a script failed
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Case = tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]


def attention(mask: str = "", **kwargs: Any) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2], dtype=q.dtype, device=q.device) if mask else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **kwargs)

    return run


def autocast_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def indices(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device=like.device)


def cases() -> dict[str, Case]:
    """name -> function, and the shapes of its differentiable inputs."""
    heads = [(4, 16, 512, 64)] * 3
    return {
        "softmax": (lambda x: F.softmax(x, -1), [(64, 512, 512)]),
        "softmax_float32": (lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), [(64, 512, 512)]),
        "log_softmax": (lambda x: F.log_softmax(x, -1), [(1024, 4096)]),
        "cross_entropy": (lambda x: F.cross_entropy(x, indices(x, 1024)), [(1024, 8192)]),
        "logsumexp": (lambda x: x.logsumexp(-1), [(4096, 1024)]),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (1024,), w, b), [(4096, 1024), (1024,), (1024,)]),
        "gelu": (lambda x: F.gelu(x, approximate="tanh"), [(4096, 1024)]),
        "dropout": (lambda x: F.dropout(x, 0.1), [(4096, 1024)]),
        "embedding": (lambda w: F.embedding(indices(w, 8, 1024), w), [(32000, 256)]),
        "index_select": (lambda x: x.index_select(0, indices(x, 2048)), [(4096, 256)]),
        "gather": (lambda x: x.gather(1, indices(x, 4096, 16)), [(4096, 256)]),
        "topk": (lambda x: x.topk(8, -1)[0], [(8192, 128)]),
        "max": (lambda x: x.max(-1)[0], [(8192, 1024)]),
        "scatter_add": (lambda x: torch.zeros_like(x).scatter_add(0, indices(x, 4096, 256), x), [(4096, 256)]),
        "attention_causal": (attention(is_causal=True), heads),
        "attention_dropout": (attention(dropout_p=0.1), heads),
        "attention_mask": (attention("zeros"), heads),
        "attention_autocast": (autocast_attention, heads),
        "attention_head_80": (attention(is_causal=True), [(4, 16, 512, 80)] * 3),
        "attention_head_128": (attention("zeros"), [(4, 16, 512, 128)] * 3),
    }


def inputs(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def peak(sizes: Iterable[int]) -> int:
    """Of allocations (positive) and frees (negative), 512-byte blocks."""
    now = most = 0
    for size in sizes:
        now += (abs(size) + 511) // 512 * (512 if size > 0 else -512)
        most = max(most, now)
    return most


def on_card(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[int]:
    record = torch.cuda.memory._record_memory_history

    def seen() -> list[int]:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        return [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in ("alloc", "free_completed")]

    run(*tensors)  # first calls make handles and workspaces
    gc.collect()
    record(enabled=None)
    record(max_entries=100_000, stacks="python", context=None)
    out = run(*tensors)
    forward = seen()
    seed = torch.empty_like(out)
    before = len(seen())
    grads = torch.autograd.grad(out, tensors, seed)
    return [peak(forward), peak(seen()[before:])] if grads else []


def traced(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor], mode: Any, card: Any) -> list[int]:
    from launchguard.events import TraceOp
    from launchguard.trace.capture import Tracker

    tracker = Tracker(card)
    tracker.ignore(tensors)
    with mode, tracker:
        out = run(*tensors)
        forward = len(tracker.events)
        seed = torch.empty_like(out)
        before, tracker.in_backward = len(tracker.events), True
        grads = torch.autograd.grad(out, tensors, seed)
        events = list(tracker.events)
        del grads
    sizes: dict[int, int] = {}
    signed = []
    for op, a, b in events:
        sizes[a] = b if op is TraceOp.ALLOC else sizes.get(a, 0)
        signed.append(b if op is TraceOp.ALLOC else -sizes[a] if op is TraceOp.FREE else 0)
    return [peak(signed[:forward]), peak(signed[before:])]


def main(where: str, *args: str) -> str:
    found: dict[str, list[int]] = {}
    if where == "card":
        gc.disable()  # what it frees while an op is looked at would be counted
        warm = torch.ones(8, 8, device="cuda")
        warm @ warm
        for name, (run, shapes) in cases().items():
            for kind, dtype in DTYPES.items():
                found[f"{name} {kind}"] = on_card(run, inputs(shapes, dtype, "cuda"))
        return json.dumps([[n >> 10 for n in pair] for pair in found.values()], separators=(",", ":"))
    from torch._subclasses.fake_tensor import FakeTensorMode

    from launchguard.trace.cuda_semantics import DEVICE, Card, Semantics

    major, minor = (int(x) for x in args[0].split(","))
    card = Card((major, minor), int(args[1]), 1024 if (major, minor) == (7, 5) else 2048, (2, 14))
    Semantics(card).install()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name, (run, shapes) in cases().items():
        for kind, dtype in DTYPES.items():
            with mode:
                tensors = inputs(shapes, dtype, DEVICE)
            found[f"{name} {kind}"] = traced(run, tensors, mode, card)
    return json.dumps(found)


if __name__ == "__main__":
    if sys.argv[1] == "card":
        raise RuntimeError(f"OPS {main('card')} OPS")
    print(main(*sys.argv[1:]), flush=True)
    os._exit(0)  # a Python PrivateUse1 backend aborts at interpreter exit
