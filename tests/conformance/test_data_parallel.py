"""strategies/data_parallel.py against torch's own nn.DataParallel, card by card, to 4 KiB.

data_parallel_worker.py says what is written there in place of CUDA code. Threads of real replicas run at the same time; a card's own order
of events, which is all that is compared, is the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fsdp_sides import job_of, name_of, replay, run_cases

from launchguard.profiles import device
from launchguard.strategies import data_parallel

LIMIT = "4096 B"
TOLERANCE = 4096

CASES: list[dict[str, Any]] = [
    dict(model="llama"),
    dict(model="llama", cards=4),
    dict(model="llama", gas=2),
    dict(model="llama", tied=True),
    dict(model="llama", freeze="layers"),
    dict(model="llama", checkpoint="model"),
    dict(model="llama", hidden=768, vocabulary=2000, cards=3),
    dict(model="llama", hidden=768, vocabulary=2000, freeze="lm_head", gas=2),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = run_cases("data_parallel_worker.py", CASES, tmp_path_factory.mktemp("data_parallel"))
    return {name_of(c): r for c, r in zip(CASES, results)}


@pytest.mark.parametrize("name", [name_of(c) for c in CASES])
def test_bytes(name: str, real: dict[str, dict[str, Any]], residuals: list[Any]) -> None:
    result = real[name]
    assert not result["error"], result["error"]
    card = dataclasses.replace(device("a100-80-sxm"), cublas_workspace_bytes=0)
    job, wrong = job_of(result["case"]), []
    for ranks in data_parallel.representatives(job, result["trace"]):
        ours = replay(data_parallel.schedule(job, result["trace"], ranks, card).events)
        for phase in {r["phase"]: None for r in result["phases"]}:
            rows = [r for r in result["phases"] if r["phase"] == phase]
            for k in ranks:
                found = {"peak": (ours[phase].peak, max(r["peak"][k] for r in rows)), "end": (ours[phase].end, rows[-1]["end"][k])}
                for quantity, (predicted, measured) in found.items():
                    residuals.append((f"dp {name}", phase, f"{quantity} card {k}", predicted, measured))
                    if abs(predicted - measured) > TOLERANCE:
                        wrong.append(f"{phase} {quantity} card {k}: {predicted} {measured} {predicted - measured:+d}")
    assert not wrong, "\n".join(wrong)
