"""Accuracy on a handful of measured cases, with limits that hold today, and the scorer itself on made-up results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy
from simulate_case import run_case

MEASURED = Path(__file__).resolve().parents[1] / "measured"

# case -> (limit on the error of allocated bytes, of reserved bytes), percent
LIMITS: dict[str, tuple[float, float]] = {
    "vgpu-gpt2-medium-6l-trainer-amp": (0.1, 1.0),
    "vgpu-llama-8b-2l-qlora-rtx4090": (0.1, 1.0),
    "vgpu-llama-1b-4l-accelerate-fsdp2": (0.1, 1.0),
    "vgpu-llama-1b-4l-deepspeed-zero2": (0.1, 1.0),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHGUARD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        cases = [c for c in accuracy.read_cases(MEASURED / "vgpu_dev.yaml") if c["id"] in LIMITS]
        return {r["id"]: r for r in accuracy.run_all([(c, MEASURED) for c in cases], jobs=2, use_cache=True, timeout_s=300)}


@pytest.mark.parametrize("case", LIMITS)
def test_recorded_run(results: dict[str, dict[str, Any]], case: str) -> None:
    result, (allocated, reserved) = results[case], LIMITS[case]
    assert "not_run" not in result, result
    assert result["metric"] == "max_allocated"
    assert abs(result["error_pct"]) <= allocated
    assert [abs(a["error_pct"]) <= reserved for a in result["also"]] == [True]


def test_a_broken_case_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    for case in ({}, {"id": "x", "kind": "measured"}, {"id": "y", "kind": "oom", "framework": "what", "method": None}):
        result = run_case(case, tmp_path)
        assert result["not_run"]
    document = accuracy.score([run_case({"id": "x"}, tmp_path)])
    assert document["ran"] == 0 and sum(document["not_run"].values()) == 1
    json.dumps(document)
    assert accuracy.report(document, markdown=True)


def test_scores() -> None:
    base = {"kind": "measured", "framework": "ddp", "method": "full", "stack": "s", "confidence": "high", "metric": "max_reserved",
            "predicted_oom": False, "also": [], "peak_phase": "step_2"}  # fmt: skip
    results = [
        {**base, "id": "a", "group": "g", "error_pct": -10.0, "measured": 100, "predicted": 90, "interval": (80, 95)},
        {**base, "id": "b", "group": "g", "error_pct": 2.0, "measured": 100, "predicted": 102, "interval": (98, 104)},
        {"id": "c", "kind": "oom", "verdict": "fits", "right": False},
        {"id": "d", "kind": "fits", "verdict": "fits", "right": True},
        {"id": "e", "kind": "fits", "not_run": "why", "not_run_detail": ""},
    ]  # fmt: skip
    document = accuracy.score(results)
    assert document["metrics"]["max_reserved"] == {
        "n": 2, "median_abs_pct": 6.0, "p90_abs_pct": 9.2, "mean_abs_pct": 6.0, "mean_signed_pct": -4.0, "max_under_pct": 10.0,
    }  # fmt: skip
    assert document["boundary"] == {"oom": 1, "missed_oom": 1, "fits": 1, "false_alarm": 0, "wrong": ["c"]}
    assert document["interval"]["inside_pct"] == 50.0
    assert (document["cases"], document["ran"], document["not_run"]) == (5, 4, {"why": 1})
    assert document["worst"][0]["id"] == "a"
