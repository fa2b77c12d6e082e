"""strategies/fsdp2.py and its units against what Accelerate itself makes of a model: its own fsdp2_prepare_model wraps (groups of their own
for the embedding and for final norm and head), torch's fully_shard runs. FSDP1 through Accelerate is test_fsdp1.py's case with `load`."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_sides import check, name_of, run_cases

BF16 = {"compute": "bfloat16", "reduce": "bfloat16"}  # as set_mixed_precision makes them

CASES: list[dict[str, Any]] = [
    dict(),
    dict(**BF16),
    dict(reshard=False, **BF16),
    dict(tied=True, **BF16),
    dict(gas=2, **BF16),
    dict(world=3, rank=2, **BF16),
    dict(model="llama", **BF16),
    dict(model="llama", tied=True, checkpoint="wrapper", **BF16),
    dict(lora=True, freeze="lora", **BF16),
    dict(lora=True, freeze="lora", gas=2, **BF16),
    dict(lora=True, freeze="lora", tied=True, **BF16),
    dict(lora=True, freeze="lora", tied=True, gas=2, **BF16),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = [{"kind": "fsdp2", "grouping": True, **c} for c in CASES]
    results = run_cases("fsdp_worker.py", cases, tmp_path_factory.mktemp("accelerate"))
    return {name_of(c): {**r, "label": f"accelerate {name_of(c)}"} for c, r in zip(CASES, results)}


@pytest.mark.parametrize("name", [name_of(c) for c in CASES])
def test_bytes(name: str, real: dict[str, dict[str, Any]], residuals: list[Any]) -> None:
    check(real[name], 0, residuals)
