"""strategies/ddp.py against torch's real DistributedDataParallel, to 4 KiB: parameters, buckets, gradients, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_sides import check, name_of, run_cases

TOLERANCE = 4096
LIMIT = "4096 B"

CASES: list[dict[str, Any]] = [
    dict(),
    dict(view=True),
    dict(static=True),
    dict(unused=True),
    dict(static=True, view=True),
    dict(gas=3),
    dict(gas=2, view=True),
    dict(tied=True),
    dict(freeze="layers"),
    dict(hook="fp16"),
    dict(hook="bf16", view=True, gas=2),
    dict(hook="bf16", static=True),
    dict(hook="power_sgd"),
    dict(hook="power_sgd", view=True),
    dict(hook="power_sgd", gas=2),
    dict(hook="power_sgd", static=True),
    dict(hook="bf16", unused=True),
    dict(hook="power_sgd", unused=True),
    dict(hook="power_sgd", unused=True, view=True),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = run_cases("ddp_worker.py", CASES, tmp_path_factory.mktemp("ddp"))
    return {name_of(c): {**r, "label": f"ddp {name_of(c)}"} for c, r in zip(CASES, results)}


@pytest.mark.parametrize("name", [name_of(c) for c in CASES])
def test_bytes(name: str, real: dict[str, dict[str, Any]], residuals: list[Any]) -> None:
    check(real[name], TOLERANCE, residuals)
