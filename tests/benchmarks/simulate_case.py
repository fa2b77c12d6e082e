"""One measured case through launchguard: a plain dictionary of what was measured and what was predicted, or why the case was not run."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from truth_cases import Case, NotRun, attach_config, job_of

from launchguard import strategies, trace, verdict
from launchguard.allocator import replay, smallest_limit
from launchguard.errors import LaunchguardError
from launchguard.events import RankSchedule
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.units import MIB
from launchguard.verdict import Outside, RankPrediction, Verdict

METRICS = ("max_allocated", "max_reserved", "device_used")
BEFORE_TRAINING = ("load", "prepare")
Result = dict[str, Any]


def run_case(case: Case, folder: Path, use_cache: bool = True, timeout_s: int = 600) -> Result:
    """Never raises: whatever goes wrong becomes result["not_run"] (the reason, counted) and ["not_run_detail"]."""
    started = time.perf_counter()
    result = _labels(case)
    try:
        with _time_limit(timeout_s):
            result |= _predict(case, folder, use_cache)
    except NotRun as e:
        result |= {"not_run": str(e), "not_run_detail": ""}
    except TimeoutError:
        result |= {"not_run": f"took more than {timeout_s} s", "not_run_detail": ""}
    except LaunchguardError as e:
        result |= {
            "not_run": f"{type(e).__name__}: {_kind_of(e.message)}",
            "not_run_detail": " ".join(x for x in (e.message, e.where) if x),
        }
    except Exception as e:  # one case must not stop the others
        result |= {"not_run": f"{type(e).__name__}: {_kind_of(str(e))}", "not_run_detail": str(e)}
    result["seconds"] = round(time.perf_counter() - started, 2)
    return result


def _labels(case: Case) -> Result:
    """What the scores are grouped by. Tolerates incomplete cases."""
    framework, method, outcome = (
        x if isinstance(x, dict) else {} for x in (case.get("framework"), case.get("method"), case.get("outcome"))
    )
    name, stage = str(framework.get("name")), framework.get("zero_stage")
    return {
        "id": str(case.get("id")),
        "group": str(case.get("group")),
        "kind": str(case.get("kind")),
        "framework": f"{name}{stage}" if name == "zero" else name,
        "method": str(method.get("type")),
        "stack": str(case.get("stack")),
        "confidence": str(case.get("confidence")),
        "basis": outcome.get("basis"),
    }


def _kind_of(message: str) -> str:
    """The first line without what differs from case to case, so that reasons can be counted."""
    line = (message.strip().splitlines() or ["no message"])[0]
    return "".join("N" if c.isdigit() else c for c in line)[:120]


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


# ------------------------------------------------------------------------------------------------ prediction
def _predict(case: Case, folder: Path, use_cache: bool) -> Result:
    job, device = job_of(attach_config(case, folder), folder)
    traced = trace.trace_job(job, device, use_cache=use_cache)
    schedules = strategies.schedules(job, traced, device)
    outside, capacity = _capacity(case, job, device)
    budget = dataclasses.replace(verdict.device_budget(device, "0%"), usable_bytes=capacity, budget_bytes=capacity)
    judged = verdict.judge(job, traced, schedules, device, budget)
    result: Result = {
        "launchguard_confidence": judged.confidence.level,
        "reasons": list(judged.confidence.reasons),
        "verdict": judged.verdict,
        "capacity": capacity,
    }
    if case["kind"] == "measured":
        return result | _measured(case, job, judged, schedules, outside, capacity)
    return result | _boundary(case, job, judged, schedules)


def _capacity(case: Case, job: JobSpec, device: DeviceProfile) -> tuple[Outside, int]:
    """Bytes outside the allocator, and the budget that judge compares with. A virtual card holds its context and nothing of a
    communication library, which judge subtracts all the same: it is added back."""
    outside = verdict.outside_allocator(job, device)
    if case["hardware"].get("virtual"):
        return dataclasses.replace(outside, communication=0), device.total_bytes + outside.communication
    return outside, device.total_bytes


def _rank_of(case: Case, judged: Verdict) -> int:
    """Index of the kind of rank that was measured: the recorded one, "rank 0", else the worst."""
    recorded = ((case.get("inputs") or {}).get("launch") or {}).get("rank")
    if recorded is None and str(case["measured"].get("rank") or "").startswith("rank 0"):
        recorded = 0
    for i, r in enumerate(judged.ranks):
        if recorded in r.ranks:
            return i
    return judged.ranks.index(verdict.worst_rank(judged.ranks))


def _measured(
    case: Case, job: JobSpec, judged: Verdict, schedules: Sequence[RankSchedule], outside: Outside, capacity: int
) -> Result:  # fmt: skip
    index = _rank_of(case, judged)
    rank, measured = judged.ranks[index], case["measured"]
    peaks = _peaks(rank, job, schedules[index], outside, capacity, str(measured.get("when") or ""))
    metric = measured["metric"]
    if metric not in METRICS:
        raise NotRun(f"metric {metric}")
    out: Result = {
        "metric": metric,
        "peak_phase": rank.peak.name,
        "predicted_oom": rank.oom is not None,
        **_compared(measured, peaks[metric]),
        "breakdown": dict(rank.breakdown),
        "also": [],
    }
    for other in measured.get("also") or []:
        if other.get("metric") in METRICS and other.get("bytes") and other["metric"] != metric:
            out["also"].append({"metric": other["metric"], **_compared(other, peaks[other["metric"]])})
    out["interval"] = {"max_allocated": judged.interval.allocated, "max_reserved": judged.interval.reserved}.get(
        metric, judged.interval.device
    )
    return out


def _peaks(
    rank: RankPrediction, job: JobSpec, schedule: RankSchedule, outside: Outside, capacity: int, when: str
) -> dict[str, int]:  # fmt: skip
    """Predicted bytes by metric, over the phases that the source measured, on a card of the stated size: a cache that would grow past the
    card is given back, as the allocator does. A run predicted to fail has its unlimited figures."""
    timeline = rank.timeline
    if rank.oom is None and timeline.reserved_bytes + outside.total > capacity:
        timeline = replay(schedule.events, job.allocator_conf, max(1, capacity - outside.total))
    phases = [p for p in timeline.phases if _counts(p.name, when)] or list(timeline.phases)
    reserved = max(p.reserved_bytes for p in phases)
    return {
        "max_allocated": max(p.allocated_bytes for p in phases),
        "max_reserved": reserved,
        "device_used": reserved + outside.total,
    }


def _counts(phase: str, when: str) -> bool:
    """Does a peak measured `when` see this phase?"""
    steady = ("steady", "second step", "reset each step", "reset after the first")
    if any(word in when for word in steady):
        return not phase.endswith("_1") and phase not in BEFORE_TRAINING
    if "train stage" in when:
        return phase not in BEFORE_TRAINING
    return True


def _compared(measured: dict[str, Any], predicted: int) -> dict[str, Any]:
    """A prediction inside bytes +- tolerance is exact (SCHEMA.md)."""
    actual, tolerance = measured["bytes"], measured.get("bytes_tolerance") or 0
    exact = abs(predicted - actual) <= tolerance
    return {"measured": actual, "predicted": predicted, "error_pct": 0.0 if exact else 100 * (predicted / actual - 1)}


def _boundary(case: Case, job: JobSpec, judged: Verdict, schedules: Sequence[RankSchedule]) -> Result:
    """Fits or not; and, for recorded virtual cards, the smallest card on which it would."""
    worst = verdict.worst_rank(judged.ranks)
    out: Result = {
        "predicted": worst.peak.device_bytes,
        "predicted_allocated": worst.peak.allocated_bytes,
        "right": judged.verdict == ("fits" if case["kind"] == "fits" else "exceeds"),
        "peak_phase": worst.peak.name,
        "breakdown": dict(worst.breakdown),
    }
    smallest = ((case.get("outcome") or {}).get("evidence") or {}).get("smallest_card_mib")
    if smallest and case["kind"] == "fits":
        recorded = (case.get("inputs") or {}).get("launch", {}).get("rank", 0)
        index = next((i for i, r in enumerate(judged.ranks) if recorded in r.ranks), judged.ranks.index(worst))
        peak, events = judged.ranks[index].peak, schedules[index].events
        out["smallest_card_measured"] = smallest * MIB
        out["smallest_card_predicted"] = smallest_limit(
            events, job.allocator_conf, peak.allocated_bytes, max(peak.reserved_bytes, peak.allocated_bytes)
        )
    return out
