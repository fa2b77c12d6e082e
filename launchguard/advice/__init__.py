"""What would make the job fit. One file per adjustment, each with

    CODE, SAFETY ("safe": numerics unchanged | "review"), COST
    applies(job) -> bool
    PHASES (if it cannot help in others): the phases that it makes smaller
    apply(job) -> iterator of (title, {dotted field: new value}), the mildest change first

Every change is simulated before it is printed. A change names the place in the user's own files where it is made (_edits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launchguard import registry
from launchguard.advice._edits import edits_of
from launchguard.errors import LaunchguardError
from launchguard.job import JobSpec
from launchguard.verdict import Advice, Verdict, host_exceeds, worst_rank

Simulate = Callable[[JobSpec], Verdict]
ORDER = (
    "bound_evaluation",
    "expandable_segments",
    "load_on_one_rank",
    "shard_state_dict",
    "checkpoint_activations",
    "raise_sharding",
    "shrink_micro_batch",
)  # no cost in numerics first, throughput last


def advise(verdict: Verdict, simulate: Simulate) -> list[Advice]:
    """Simulated advice for a job that does not fit: those that fit first, then those that bring it nearest; when no single change is
    enough, also the first combination that is. Changes that do not lower the peak are left out."""
    job, worst = verdict.job, worst_rank(verdict.ranks)
    before = 0 if _only_host(verdict) else worst.peak.device_bytes  # when only the host is short, a smaller device peak is no help
    found: list[tuple[Advice, dict[str, Any]]] = []
    where = _failing_phases(verdict)
    for name in _names():
        if where.isdisjoint(getattr(registry.load("advice", name), "PHASES", where)):
            continue
        best = _best(name, job, simulate)
        if best is not None and (best[0].fits or best[0].device_bytes < before):
            found.append(best)
    advice = [a for a, _ in found]
    if len(found) > 1 and not any(a.fits for a in advice):
        combined = _combined(job, [changes for _, changes in found], simulate)
        if combined is not None:
            advice.append(combined)
    return sorted(advice, key=lambda a: (not a.fits, a.device_bytes if not a.fits else 0))


def _failing_phases(verdict: Verdict) -> set[str]:
    """Where the device or the host runs out, and the device's peak."""
    worst = worst_rank(verdict.ranks)
    device = set() if _only_host(verdict) else {worst.peak.name, *([worst.oom.phase] if worst.oom is not None else [])}
    return device | {node.phase for node in verdict.host if host_exceeds(node)}


def _only_host(verdict: Verdict) -> bool:
    return worst_rank(verdict.ranks).oom is None and any(map(host_exceeds, verdict.host))


def _names() -> list[str]:
    known = registry.names("advice")
    return [n for n in ORDER if n in known] + [n for n in known if n not in ORDER]


def _best(name: str, job: JobSpec, simulate: Simulate) -> tuple[Advice, dict[str, Any]] | None:
    """The mildest step of one adjustment that fits; the one that needs least when none does."""
    module = registry.load("advice", name)
    best: tuple[Advice, dict[str, Any]] | None = None
    for title, changes in module.apply(job) if module.applies(job) else ():
        outcome = _try(job, changes, simulate)
        if outcome is None:
            continue
        advice = Advice(
            module.CODE, title, edits_of(job, changes), _device_bytes(outcome), outcome.verdict == "fits", module.SAFETY, module.COST
        )
        if advice.fits:
            return advice, changes
        if best is None or advice.device_bytes < best[0].device_bytes:
            best = advice, changes
    return best


def _try(job: JobSpec, changes: Mapping[str, Any], simulate: Simulate) -> Verdict | None:
    try:
        return simulate(job.changed(changes))
    except LaunchguardError:  # a change that cannot be simulated is not advice
        return None


def _combined(job: JobSpec, parts: list[dict[str, Any]], simulate: Simulate) -> Advice | None:
    """The changes added up in order until the job fits."""
    taken: list[dict[str, Any]] = []
    outcome = None
    for part in parts:
        taken.append(part)
        outcome = _try(job, _merge(taken), simulate) if len(taken) > 1 else None
        if outcome is not None and outcome.verdict == "fits":
            break
    if outcome is None or outcome.verdict != "fits":
        return None
    changes = _merge(taken)
    edits = edits_of(job, changes)
    return Advice("LG450", "all of these together", edits, _device_bytes(outcome), True, "review", "the costs of each")


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged


def _device_bytes(verdict: Verdict) -> int:
    """What the worst rank will be seen to use: the cache never grows beyond a budget that it can live within."""
    peak = worst_rank(verdict.ranks).peak.device_bytes
    return min(peak, verdict.device.budget_bytes) if verdict.verdict == "fits" else peak
