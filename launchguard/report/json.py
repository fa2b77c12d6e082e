"""The JSON report, schema 1. Its form is fixed by schema/report-1.schema.json; a field is never renamed or dropped within a schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launchguard import __version__
from launchguard.interval import Interval
from launchguard.report.wording import CATEGORIES, effective_configuration, plain
from launchguard.verdict import Advice, HostPrediction, PhaseBytes, RankPrediction, Verdict, next_limit

SCHEMA = 1
SCHEMA_FILE = Path(__file__).parent / "schema" / "report-1.schema.json"


def to_dict(verdict: Verdict, advice: Sequence[Advice]) -> dict[str, Any]:
    """The report as a dict that json.dumps takes. All sizes are bytes."""
    device = verdict.device
    return {
        "schema": SCHEMA,
        "launchguard": __version__,
        "verdict": verdict.verdict,
        "confidence": {
            "level": verdict.confidence.level,
            "reasons": [*verdict.confidence.reasons],
            "interval": _interval(verdict.interval),
        },
        "job": {entry.field: {"value": entry.value, "origin": entry.origin} for entry in effective_configuration(verdict.job)},
        "device": {
            "name": device.name,
            "usable_bytes": device.usable_bytes,
            "headroom_bytes": device.headroom_bytes,
            "budget_bytes": device.budget_bytes,
            "source": device.source,
        },
        "ranks": [_rank(rank) for rank in verdict.ranks],
        "host": [_host(node) for node in verdict.host],
        "lengths": [{"label": p.label, "tokens": p.tokens, "device_bytes": p.device_bytes, "verdict": p.verdict} for p in verdict.lengths],
        "advice": [_advice(piece) for piece in advice],
        "notes": [{"code": note.code, "severity": note.severity, "message": note.message, "origin": note.origin} for note in verdict.notes],
        "timing_seconds": {stage: float(seconds) for stage, seconds in verdict.timing_seconds.items()},
    }


def _interval(interval: Interval) -> dict[str, list[int]]:
    return {
        "allocated_bytes": [*interval.allocated],
        "reserved_bytes": [*interval.reserved],
        "device_bytes": [*interval.device],
    }


def _sizes(phase: PhaseBytes) -> dict[str, int]:
    return {"allocated_bytes": phase.allocated_bytes, "reserved_bytes": phase.reserved_bytes, "device_bytes": phase.device_bytes}


def _rank(rank: RankPrediction) -> dict[str, Any]:
    after = next_limit(rank)
    return {
        "ranks": [*rank.ranks],
        "peak": {"phase": rank.peak.name, "module": rank.peak.module, **_sizes(rank.peak)},
        "next": None if after is None else {"phase": after.name, "module": after.module, **_sizes(after)},
        "phases": [{"name": phase.name, **_sizes(phase)} for phase in rank.phases],
        "breakdown": {category: int(rank.breakdown.get(category, 0)) for category in CATEGORIES},
    }


def _host(node: HostPrediction) -> dict[str, Any]:
    return {
        "node": node.node,
        "peak_bytes": node.peak_bytes,
        "phase": node.phase,
        "budget_bytes": node.budget_bytes,
        "breakdown": {label: int(nbytes) for label, nbytes in node.breakdown.items()},
    }


def _advice(piece: Advice) -> dict[str, Any]:
    return {
        "code": piece.code,
        "title": piece.title,
        "changes": [
            {"file": change.file, "key": change.key, "old": plain(change.old), "new": plain(change.new)} for change in piece.changes
        ],
        "device_bytes": piece.device_bytes,
        "fits": piece.fits,
        "safety": piece.safety,
        "cost": piece.cost,
    }
