"""The verdict on a rehearsal: the same report as a prediction's, made of what the ranks really did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import shorten

from launchguard.interval import UNKNOWN, interval_of
from launchguard.job import JobSpec, Note
from launchguard.profiles import DeviceProfile, devices
from launchguard.rehearsal.record import RankRecord
from launchguard.units import gib
from launchguard.verdict import Confidence, DeviceBudget, Outside, PhaseBytes, RankPrediction, Verdict, breakdown, causes_of, worst_rank

SHOWN_DEVICES = 3


def judge_records(
    job: JobSpec, records: Sequence[RankRecord], unlimited: Mapping[int, RankRecord], device: DeviceProfile, budget: DeviceBudget,
    known_job: bool, who: str,
) -> Verdict:  # fmt: skip
    """records: of every rehearsed rank on the card; unlimited: the same ranks without a limit, where they ran out of memory;
    known_job: the configuration was read, so that causes can be named; who: "the script", or "the stand-in" that ran in its place."""
    ranks = tuple(_prediction(record, unlimited.get(record.rank), device) for record in records if record.reserved_bytes)
    failed = [record for record in records if record.result not in ("ok", "oom")]
    alone = [record for record in failed if _needs_peers(record, records)]
    read = [note for note in job.notes if not (note.code.startswith("LG3") and who == "the script")]  # what only a prediction lacks
    notes = [*read, *_failures([r for r in failed if r not in alone], who), *_stranded(alone, records), *_observations(records)]
    if failed or not ranks:
        reason = f"{who} put nothing on the card"
        if failed:
            reason = f"{who} {'cannot go on alone' if failed == alone else 'failed'} on rank {failed[0].rank}"
        return Verdict("unknown", job, budget, ranks, (), (), Confidence("low", (reason,)), UNKNOWN, tuple(notes), {})
    worst = worst_rank(ranks)
    exceeds = any(record.result == "oom" for record in records)
    if exceeds:
        notes += _would_fit(worst, device)
    causes = tuple(causes_of(job, worst)) if exceeds and known_job and worst.timeline.live else ()
    allocated, reserved = worst.peak.allocated_bytes, worst.peak.reserved_bytes
    beside = worst.peak.device_bytes - reserved - device.context_bytes
    interval = interval_of(allocated, reserved, (beside + device.context_low, beside + device.context_high), ())
    return Verdict("exceeds" if exceeds else "fits", job, budget, ranks, (), causes, _confidence(records), interval, tuple(notes),
                   {f"rank {record.rank}": round(record.seconds, 2) for record in records})  # fmt: skip


def _prediction(record: RankRecord, unlimited: RankRecord | None, device: DeviceProfile) -> RankPrediction:
    """What the rank needs (without a limit, where that is known), and the allocation that failed on the card."""
    need = unlimited if unlimited is not None and unlimited.result == "ok" else record
    communication = max(0, need.device_peak_bytes - need.reserved_bytes - device.context_bytes)
    outside = Outside(device.context_bytes, device.context_low, device.context_high, communication, communication, communication)
    timeline = replace(need.timeline(), oom=record.oom)
    phases = tuple(PhaseBytes(p.name, "", p.allocated_bytes, p.reserved_bytes, p.reserved_bytes + outside.total) for p in timeline.phases)
    peak = PhaseBytes(need.peak_phase, "", need.allocated_bytes, need.reserved_bytes, need.reserved_bytes + outside.total)
    return RankPrediction((record.rank,), timeline, phases, peak, breakdown(timeline, peak, outside), record.oom)


def _failures(failed: Sequence[RankRecord], who: str) -> list[Note]:
    same: dict[tuple[str, str], list[int]] = {}
    for record in failed:
        same.setdefault((_failure(record, who), _where(record)), []).append(record.rank)
    return [Note("LG105", "error", f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}", where)
            for (text, where), ranks in same.items()]  # fmt: skip


def _needs_peers(record: RankRecord, records: Sequence[RankRecord]) -> bool:
    """Did it end where rank 0 went on, and rank 0 has written or sent what it does not have? Ranks run alone, each with its own files."""
    first = records[0]
    return record.result == "error" and first.rank == 0 and first.result == "ok" and bool(record.awaited or first.written - record.written)


def _stranded(alone: Sequence[RankRecord], records: Sequence[RankRecord]) -> list[Note]:
    notes = []
    for record in alone:
        wrote = sorted(records[0].written - record.written)
        what = " and ".join([*([f"the files that rank 0 wrote ({wrote[0]}{' ...' if wrote[1:] else ''})"] if wrote else ()),
                             *(["what other ranks send"] if record.awaited else ())])  # fmt: skip
        failure = shorten(_failure(record, "it").splitlines()[0], 200, placeholder=" ...")
        message = f"rank {record.rank} stops where rank 0 went on: {failure}; alone it does not have {what}, so it is not known"
        notes.append(Note("LG127", "warning", message, _where(record)))
    return notes


def _failure(record: RankRecord, who: str) -> str:
    printed = f"the last lines of its log:\n{record.log}" if record.log.strip() else "it printed nothing"
    if record.result == "timeout":
        return f"the time limit came after {record.optimizer_steps} optimizer steps; {printed}"
    if record.failure is None:
        how = f"ended by signal {-record.exit_code}" if record.exit_code < 0 else f"ended with exit code {record.exit_code}"
        return f"{who} {how}; {printed}"
    phase = record.failed_in or "load"
    message = record.failure.message.strip() or "no message"
    return f"{who} fails in {phase}: {record.failure.type}: {message}"


def _where(record: RankRecord) -> str:
    failure = record.failure
    return "" if failure is None or not failure.where else failure.where + (f": {failure.line}" if failure.line else "")


def _observations(records: Sequence[RankRecord]) -> list[Note]:
    """What was seen that a reader must know to trust the figures."""
    notes = []
    first = records[0]
    kept = list(dict.fromkeys(path for record in records for path in record.kept))
    if kept:
        notes.append(
            Note(
                "LG124",
                "info",
                f"the script would delete or move {', '.join(kept[:3])}{' ...' if len(kept) > 3 else ''}; it was left alone",
            )
        )
    changed = first.changed
    if changed:
        which = f"{', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}"
        notes.append(Note("LG126", "warning", f"changed in the working folder while the script ran: {which}"))
    reads = sorted({where for record in records for where in record.value_reads})
    if reads:
        where = ", ".join(reads[:3])
        notes.append(Note("LG130", "warning", f"the script branches on values from the card, which are zero in a rehearsal, at {where}: "
                          "the real job may take another way"))  # fmt: skip
    without = sorted({kind for record in records for kind in record.without_cudnn})
    if without:
        notes.append(
            Note("LG131", "warning", f"{' and '.join(without)} run without the workspace of cuDNN or cuSOLVER: a lower bound for them")
        )
    if all(record.result == "ok" for record in records) and any(record.retries for record in records):
        notes.append(Note("LG120", "warning", "fits only because the allocator gives cached blocks back: expect retries and slow steps"))
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    if versions:
        steps = min(record.optimizer_steps for record in records)
        notes.append(
            Note("LG123", "info", f"rehearsed {steps} optimizer steps on ranks {', '.join(str(r.rank) for r in records)} with {versions}")
        )
    return notes


def _confidence(records: Sequence[RankRecord]) -> Confidence:
    reasons = []
    if any(record.without_cudnn for record in records):
        reasons.append("the workspace of cuDNN or cuSOLVER is not counted")
    if any(record.value_reads for record in records):
        reasons.append("the script branches on values from the card, which are zero")
    if any(record.optimizer_steps == 0 for record in records if record.result == "ok"):
        reasons.append("the script made no optimizer step")
    return Confidence("medium" if reasons else "high", tuple(reasons))


def _would_fit(worst: RankPrediction, device: DeviceProfile) -> list[Note]:
    """The smallest known CUDA cards that hold what the rank needed without a limit; not scaled for what the other card's kernels need."""
    if worst.oom is not None and worst.peak.reserved_bytes <= worst.oom.reserved_bytes:
        return []  # it failed on the way, and what it needs is not known
    outside = worst.peak.device_bytes - worst.peak.reserved_bytes - device.context_bytes
    fitting = [d for d in devices() if d.vendor == "nvidia" and d.total_bytes - d.context_bytes - outside >= worst.peak.reserved_bytes]
    names = [d.name for d in sorted(fitting, key=lambda d: d.total_bytes)][:SHOWN_DEVICES]
    cards = f"; the smallest cards that hold it: {', '.join(names)}" if names else ""
    return [Note("LG122", "info", f"without a limit it needs {gib(worst.peak.device_bytes)}{cards}")]
