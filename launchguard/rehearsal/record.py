"""What one rehearsed rank did, as a value, and as the MemoryTimeline that the rest of launchguard reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launchguard.events import Category, MemoryTimeline, OutOfMemory, PhasePeak


@dataclass(frozen=True)
class Failure:
    """What ended the script. where: file:line of the user's own code; line: its text."""

    type: str
    message: str
    where: str = ""
    line: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class RankRecord:
    """result: "ok" | "oom" | "error" | "timeout" | "killed"; phases: name -> peaks as torch counts them, in bytes;
    device_peak_bytes: the card at its fullest, context and communicators included; live: (category, label) -> bytes at the allocated
    peak, None when the allocator's history was cut; value_reads: "file:line" of the script -> times it read a value from the card in order
    to branch; without_cudnn: kinds of layers whose cuDNN workspace and reserve are not in the figures; kept: paths that the script would
    have deleted or moved; changed: paths of the working folder that did change; written: files that it wrote; awaited: objects that it
    would have got from other ranks."""

    rank: int
    result: str
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_peak_bytes: int = 0
    peak_phase: str = ""
    failed_in: str = ""
    failure: Failure | None = None
    oom: OutOfMemory | None = None
    retries: int = 0
    optimizer_steps: int = 0
    live: Mapping[tuple[Category, str], int] | None = None
    value_reads: Mapping[str, int] = field(default_factory=dict)
    without_cudnn: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    awaited: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    host_peak_bytes: int = 0
    exit_code: int = 0
    log: str = ""  # the last lines that it printed

    def timeline(self) -> MemoryTimeline:
        """The record as a MemoryTimeline."""
        phases = tuple(PhasePeak(name, "", p["allocated"], p["reserved"]) for name, p in self.phases.items() if p["reserved"])
        return MemoryTimeline(
            phases, self.allocated_bytes, self.reserved_bytes, self.peak_phase, "", self.live or {}, self.oom, self.retries
        )


def read_record(rank: int, document: Mapping[str, Any]) -> RankRecord:
    """The JSON that inside/session.py wrote."""
    error, ooms, live = document["error"], document["ooms"], document["live_at_peak"]
    last = ooms[-1] if ooms and document["result"] == "oom" else None
    return RankRecord(
        rank=rank, result=document["result"], phases=document["phases"], allocated_bytes=document["max_allocated"],
        reserved_bytes=document["max_reserved"], device_peak_bytes=document["device_peak"], peak_phase=document["peak_phase"],
        failed_in=document["failed_in"] or "", failure=Failure(**error) if error else None,
        oom=OutOfMemory(last["phase"], last["module"], "the script", last["requested_bytes"], last["allocated_bytes"],
                        last["reserved_bytes"]) if last else None,
        retries=document["alloc_retries"], optimizer_steps=document["optimizer_steps"],
        live=None if live is None else {(Category(row["category"]), row["label"]): row["bytes"] for row in live},
        value_reads=document["value_reads"], awaited=document["awaited"], without_cudnn=tuple(document["without_cudnn"]),
        versions=document["versions"], seconds=document["seconds"], host_peak_bytes=document["host_peak"], exit_code=document["exit_code"],
    )  # fmt: skip
