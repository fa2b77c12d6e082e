"""strategies/fsdp2.py against torch's real fully_shard, byte for byte.

The plain module's events come from launchguard's own trace, taken where fully_shard runs (fsdp_worker.py says which of its CUDA
corrections are off there, and why). The bytes are those that are requested: no allocator rounds them.
"""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_sides import check, name_of, run_cases

BF16 = {"compute": "bfloat16"}
PURE = {"storage": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}

CASES: list[dict[str, Any]] = [
    dict(),
    dict(**BF16),
    dict(**BF16, reduce="bfloat16"),
    dict(**PURE),
    dict(world=1, **BF16),
    dict(world=4, **BF16),
    dict(reshard=False, **BF16),
    dict(reshard=2, world=4, **BF16),
    dict(reshard=2, world=4),
    dict(gas=3, **BF16),
    dict(gas=2, **BF16, reduce="bfloat16"),
    dict(gas=2, **PURE),
    dict(gas=2, **BF16, sync=True),
    dict(world=4, replicate=2, **BF16),
    dict(world=4, replicate=2, gas=2, **BF16),
    dict(world=4, replicate=2),
    dict(world=3, rank=0, **BF16),
    dict(world=3, rank=1, **BF16),
    dict(world=3, rank=2, **BF16),
    dict(world=16, rank=15, **BF16),
    dict(tied=True, **BF16),
    dict(lora=True, freeze="lora", **BF16),
    dict(lora=True, freeze="lora", gas=2, **PURE),
    dict(quant="bfloat16", lora=True, freeze="lora", **PURE),
    dict(quant="bfloat16", lora=True, freeze="lora", gas=2, **PURE),
    dict(quant="uint8", lora=True, freeze="lora", gas=2, **PURE),
    dict(freeze="layers", **BF16),
    dict(freeze="head", **BF16),
    dict(freeze="layers", gas=2, **BF16),
    dict(freeze="head", gas=3, **BF16),
    dict(freeze="head", gas=2, reshard=False, **PURE),
    dict(lora=True, freeze="lora", gas=2, targets=["down"], **BF16),
    dict(checkpoint="model", **BF16),
    dict(checkpoint="reentrant", **BF16),
    dict(checkpoint="wrapper", **BF16),
    dict(checkpoint="wrapper", reshard=False),
    dict(offload=True, **BF16),
    dict(offload=True, gas=2),
    dict(offload=True, **PURE),
    dict(offload=True, lora=True, freeze="lora", **BF16),
    dict(world=4, replicate=2, **PURE),
    dict(world=4, replicate=2, reshard=False, **BF16),
    dict(world=3, rank=2, gas=2, **BF16),
    dict(reshard=2, world=4, gas=2, **BF16),
    dict(tied=True, gas=2, **PURE),
    dict(model="llama", **BF16),
    dict(model="llama", checkpoint="model"),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = sorted(({"kind": "fsdp2", **c} for c in CASES), key=lambda c: (c.get("world", 2), c.get("rank", 0)))
    results = run_cases("fsdp_worker.py", cases, tmp_path_factory.mktemp("fsdp2"))
    return {name_of(c): {**r, "label": f"fsdp2 {name_of(c)}"} for c, r in zip(cases, results)}


@pytest.mark.parametrize("name", [name_of(c) for c in CASES])
def test_bytes(name: str, real: dict[str, dict[str, Any]], residuals: list[Any]) -> None:
    """Idle, forward, backward, step and wrapping: no residual."""
    check(real[name], 0, residuals)
