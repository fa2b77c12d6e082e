"""strategies/fsdp1.py against torch's real FullyShardedDataParallel, to 64 bytes.

The plain module's events come from launchguard's own trace, taken where FSDP runs (fsdp_worker.py says which of its CUDA
corrections are off there, and why). The bytes are those that are requested: no allocator rounds them. CPU offload cannot be compared
here: FSDP1 moves flat parameters through `.data`, and a fake tensor cannot change its device that way.
limit_all_gathers only makes the host wait: it changes no byte.
"""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_sides import check, name_of, run_cases

BF16 = {"compute": "bfloat16"}
PURE = {"storage": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}
TOLERANCE = 64
LIMIT = "64 B"

CASES: list[dict[str, Any]] = [
    dict(),
    dict(orig=True),
    dict(**BF16),
    dict(orig=True, **BF16),
    dict(**BF16, reduce="bfloat16"),
    dict(orig=True, **BF16, reduce="bfloat16"),
    dict(orig=True, **PURE),
    dict(load="bfloat16", orig=True, **BF16, reduce="bfloat16"),
    dict(sync_states=True, orig=True),
    dict(prefetch="BACKWARD_PRE", **BF16),
    dict(prefetch="BACKWARD_POST", **BF16),
    dict(prefetch="BACKWARD_PRE", forward_prefetch=True),
    dict(strategy="SHARD_GRAD_OP", **BF16),
    dict(strategy="SHARD_GRAD_OP", orig=True, prefetch="BACKWARD_PRE"),
    dict(strategy="NO_SHARD"),
    dict(strategy="NO_SHARD", **BF16),
    dict(strategy="NO_SHARD", orig=True, **BF16, reduce="bfloat16"),
    dict(strategy="HYBRID_SHARD", world=4, replicate=2, **BF16),
    dict(strategy="_HYBRID_SHARD_ZERO2", world=4, replicate=2, orig=True, **BF16),
    dict(gas=2, **BF16),
    dict(gas=3, orig=True, **BF16, reduce="bfloat16"),
    dict(gas=2, strategy="SHARD_GRAD_OP", **BF16),
    dict(gas=2, strategy="NO_SHARD"),
    dict(gas=2, sync=True, orig=True, **BF16),
    dict(world=3, rank=0, **BF16),
    dict(world=3, rank=1, orig=True, **BF16),
    dict(world=3, rank=2, **BF16),
    dict(world=64, rank=63, orig=True, **BF16),
    dict(world=1, **BF16),
    dict(wrap="size", **BF16),
    dict(wrap="none", orig=True, **BF16),
    dict(tied=True, orig=True, **BF16),
    dict(freeze="layers", orig=True, **BF16),
    dict(freeze="up", orig=True, width=64, vocabulary=20, **BF16),
    dict(lora=True, freeze="lora", orig=True, **BF16),
    dict(lora=True, freeze="lora", orig=True, targets=["up"], width=64, vocabulary=20),
    dict(lora=True, freeze="lora", orig=True, targets=["down"], width=64, vocabulary=20, gas=2, **BF16),
    dict(lora=True, freeze="lora", orig=True, wrap="peft", **BF16),
    dict(lora=True, freeze="lora", orig=True, wrap="peft", targets=["down"], width=64, vocabulary=20),
    dict(lora=True, freeze="lora", wrap="peft", gas=2),
    dict(lora=True, freeze="lora", wrap="peft", **BF16),
    dict(lora=True, freeze="lora", wrap="peft", gas=2, **BF16),
    dict(lora=True, freeze="lora", wrap="peft", load="bfloat16", orig=True, **BF16),
    dict(quant="bfloat16", lora=True, freeze="lora", wrap="peft", **PURE),
    dict(quant="bfloat16", lora=True, freeze="lora", wrap="peft", load="bfloat16", **BF16, reduce="bfloat16"),
    dict(quant="bfloat16", lora=True, freeze="lora", wrap="peft", load="bfloat16", orig=True, gas=2, **BF16, reduce="bfloat16"),
    dict(lora=True, freeze="lora", wrap="peft", orig=True, gas=2, prefetch="BACKWARD_PRE", **BF16),
    dict(lora=True, freeze="lora", orig=True, wrap="none", **BF16),
    dict(checkpoint="model", orig=True, **BF16),
    dict(checkpoint="reentrant", **BF16),
    dict(checkpoint="wrapper", orig=True, **BF16),
    dict(model="llama", orig=True, **BF16),
    dict(limit=False, **BF16),
    dict(limit=False, orig=True, prefetch="BACKWARD_PRE", forward_prefetch=True),
    dict(prefetch="BACKWARD_POST", orig=True, gas=2, **BF16),
    dict(strategy="HYBRID_SHARD", world=4, replicate=2, orig=True, gas=2, **BF16),
    dict(strategy="_HYBRID_SHARD_ZERO2", world=4, replicate=2),
    dict(wrap="size", orig=True),
    dict(wrap="none", gas=2, **BF16),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = sorted(({"kind": "fsdp1", **c} for c in CASES), key=lambda c: (c.get("world", 2), c.get("rank", 0)))
    results = run_cases("fsdp_worker.py", cases, tmp_path_factory.mktemp("fsdp1"))
    return {name_of(c): {**r, "label": f"fsdp1 {name_of(c)}"} for c, r in zip(cases, results)}


@pytest.mark.parametrize("name", [name_of(c) for c in CASES])
def test_bytes(name: str, real: dict[str, dict[str, Any]], residuals: list[Any]) -> None:
    """Idle, forward, backward, step and wrapping."""
    check(real[name], TOLERANCE, residuals)
