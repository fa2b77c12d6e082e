"""What launchguard has found out about a job: will every rank fit, where does it peak, which bytes and which settings make that peak."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchguard.allocator import replay
from launchguard.errors import InputError
from launchguard.events import Category, MemoryTimeline, OutOfMemory, RankSchedule, StepTrace, TraceOp
from launchguard.interval import UNKNOWN, Interval, interval_of
from launchguard.job import JobSpec, Note
from launchguard.profiles import DeviceProfile, communicator_bytes, host_memory
from launchguard.strategies import evaluation_growth, node_phases
from launchguard.units import gib, parse_bytes


@dataclass(frozen=True)
class PhaseBytes:
    """Peaks of one phase. allocated, reserved: as torch counts them; device: reserved + context + communication, what nvidia-smi shows."""

    name: str
    module: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class RankPrediction:
    """ranks: all that behave alike; breakdown: bytes at the peak by parameters, gradients, optimizer_states, activations,
    communication, temporaries and overhead, summing to peak.device_bytes; oom: the allocation that failed, None if none did."""

    ranks: tuple[int, ...]
    timeline: MemoryTimeline
    phases: tuple[PhaseBytes, ...]
    peak: PhaseBytes
    breakdown: Mapping[str, int]
    oom: OutOfMemory | None = None


@dataclass(frozen=True)
class Cause:
    """Why bytes are there. text: "optimizer states are replicated"; origin: "ds_config.json:zero_optimization.stage = 1"."""

    category: str
    text: str
    nbytes: int
    origin: str
    children: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class HostPrediction:
    """Host memory of one node. budget_bytes: what the node has for it, None when unknown; breakdown: bytes by label at the peak;
    fails: the first phase that needs more than the budget, None if none does."""

    node: int
    peak_bytes: int
    phase: str
    budget_bytes: int | None
    breakdown: Mapping[str, int]
    fails: str | None = None


@dataclass(frozen=True)
class LengthPrediction:
    """The worst rank at one length of batch. label: "p50" | "p90" | "p99" | "max"; tokens: of a row."""

    label: str
    tokens: int
    device_bytes: int
    verdict: str


@dataclass(frozen=True)
class DeviceBudget:
    """budget_bytes = usable_bytes - headroom_bytes; source: who says what is usable."""

    name: str
    usable_bytes: int
    headroom_bytes: int
    budget_bytes: int
    source: str


@dataclass(frozen=True)
class Confidence:
    """level: "high" | "medium" | "low"; reasons: what lowered it."""

    level: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """verdict: "fits" | "exceeds" | "unknown"; ranks: one entry per kind of rank; interval: of the worst rank's peaks;
    timing_seconds: by stage; lengths: where a file of lengths was given."""

    verdict: str
    job: JobSpec
    device: DeviceBudget
    ranks: tuple[RankPrediction, ...]
    host: tuple[HostPrediction, ...]
    causes: tuple[Cause, ...]
    confidence: Confidence
    interval: Interval
    notes: tuple[Note, ...]
    timing_seconds: Mapping[str, float]
    lengths: tuple[LengthPrediction, ...] = ()


# ---------------------------------------------------------------- advice: here, because report and advice share it
@dataclass(frozen=True)
class Change:
    """One edit of the user's own file. old: None when the key is not there yet."""

    file: str
    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Advice:
    """A change that was simulated. device_bytes: of the worst rank with it; safety: "safe" (numerics unchanged) | "review";
    cost: what it costs, in words."""

    code: str
    title: str
    changes: tuple[Change, ...]
    device_bytes: int
    fits: bool
    safety: str
    cost: str


# ---------------------------------------------------------------- judging
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def device_budget(profile: DeviceProfile, headroom: str, free_bytes: int | None = None, source: str = "") -> DeviceBudget:
    """What the job may use. headroom: "10%" of what is usable, or a size; free_bytes: what the driver says is free now (other processes
    included in what is not). Raises InputError for a headroom that is neither."""
    usable = profile.total_bytes if free_bytes is None else min(free_bytes, profile.total_bytes)
    if usable <= 0:
        raise InputError(f"others hold all of {profile.name}", where="--device-used", help="give less than the card has, or another card")
    text = headroom.strip()
    try:
        reserve = int(usable * float(text[:-1]) / 100) if text.endswith("%") else parse_bytes(text)
    except ValueError:
        raise InputError(f"not a headroom: {headroom!r}", where="--headroom", help="give a share or a size: 10% or 6GiB") from None
    if not 0 <= reserve < usable:
        raise InputError(f"a headroom of {headroom} leaves nothing of {profile.name}", where="--headroom", help="give less, e.g. 10%")
    return DeviceBudget(profile.name, usable, reserve, usable - reserve, source or profile.source)


@dataclass(frozen=True)
class Outside:
    """Bytes of a process outside torch's allocator, with their interval: CUDA context, communication library."""

    context: int
    context_low: int
    context_high: int
    communication: int
    communication_low: int
    communication_high: int

    @property
    def total(self) -> int:
        return self.context + self.communication


def outside_allocator(job: JobSpec, device: DeviceProfile) -> Outside:
    """Context of the card, and one communicator (two when shards are replicated over groups: HSDP, HYBRID_SHARD)."""
    comm = communicator_bytes(job.devices, max(job.launch.nproc_per_node, job.cards), device)
    hybrid = job.fsdp is not None and job.fsdp.shard_group_size not in (None, job.world_size)
    groups = 2 if hybrid else 1
    if job.strategy == "single":
        groups = 0
    return Outside(
        device.context_bytes, device.context_low, device.context_high, comm.nbytes * groups, comm.low * groups, comm.high * groups
    )  # fmt: skip


def predict_rank(schedule: RankSchedule, job: JobSpec, outside: Outside, budget: DeviceBudget) -> RankPrediction:
    """One rank's phases, peak and breakdown; when the free-running cache would exceed the budget, whether the allocator can live within it
    by giving cached blocks back (then oom is None all the same). oom is where the device itself is full; where the headroom is used up,
    for a rank that needs the headroom alone."""
    timeline = replay(schedule.events, job.allocator_conf)
    phases, reserved = [], 0
    for p in timeline.phases:
        reserved = p.reserved_bytes
        phases.append(PhaseBytes(p.name, p.module, p.allocated_bytes, reserved, reserved + outside.total))
    peak = PhaseBytes(
        timeline.phase, timeline.module, timeline.allocated_bytes, timeline.reserved_bytes, timeline.reserved_bytes + outside.total
    )
    oom = None
    for limit in sorted({budget.usable_bytes, budget.budget_bytes}, reverse=True):
        if oom is None and peak.device_bytes > limit:
            oom = replay(schedule.events, job.allocator_conf, max(limit - outside.total, 1)).oom
    return RankPrediction(schedule.ranks, timeline, tuple(phases), peak, breakdown(timeline, peak, outside), oom)


def next_limit(rank: RankPrediction) -> PhaseBytes | None:
    """The phase of another kind that comes nearest to the peak: what would be in the way once the peak is gone."""
    family = rank.peak.name.split("_")[0]
    others = [p for p in rank.phases if p.name.split("_")[0] not in (family, "idle")]
    return max(others, key=lambda p: p.allocated_bytes, default=None)


def breakdown(timeline: MemoryTimeline, peak: PhaseBytes, outside: Outside) -> dict[str, int]:
    """Bytes at the peak by category, summing to peak.device_bytes; what nobody claims is overhead."""
    parts = {c.value: 0 for c in Category}
    for (category, _), nbytes in timeline.live.items():
        parts[category.value] += nbytes
    parts[Category.COMMUNICATION.value] += outside.communication
    parts[Category.OVERHEAD.value] += peak.device_bytes - sum(parts.values())
    return parts


def judge(
    job: JobSpec, trace: StepTrace, schedules: Sequence[RankSchedule], device: DeviceProfile, budget: DeviceBudget
) -> Verdict:  # fmt: skip
    """Does every kind of rank fit the budget, and why (not)."""
    outside = outside_allocator(job, device)
    ranks = tuple(predict_rank(s, job, outside, budget) for s in schedules)
    worst = worst_rank(ranks)
    confidence = _confidence(job, trace)
    beside = outside.context_low + outside.communication_low, outside.context_high + outside.communication_high
    interval = interval_of(worst.peak.allocated_bytes, worst.peak.reserved_bytes, beside, job.notes)
    hosts, fails = _hosts(job, trace, schedules), any(r.oom is not None for r in ranks)
    short = [node for node in hosts if host_exceeds(node)]
    verdict = "exceeds" if fails or short else "fits"
    notes = list(job.notes)
    if verdict == "fits" and any(r.peak.device_bytes > budget.budget_bytes for r in ranks):
        notes.append(Note("LG120", "warning", "fits only because the allocator gives cached blocks back: expect retries and slow steps"))
    notes += _evaluation_notes(job, trace, worst, budget)
    return Verdict(
        verdict, job, budget, ranks, hosts, tuple(causes_of(job, worst) if fails else [c for node in short for c in _host_causes(node)]),
        confidence, interval, tuple(notes), {},
    )  # fmt: skip


def _evaluation_notes(job: JobSpec, trace: StepTrace, worst: RankPrediction, budget: DeviceBudget) -> list[Note]:
    """An evaluation whose predictions pile up on the device, over a set whose size nobody states."""
    growth = evaluation_growth(job, trace)
    if growth is None or job.evaluation is None:
        return []
    batches, nbytes = growth
    at = next((p.allocated_bytes for p in worst.phases if p.name == "evaluation"), 0)
    outside = worst.peak.device_bytes - worst.peak.reserved_bytes
    room = budget.budget_bytes - outside - at
    most = batches + room // nbytes if room >= 0 else max(0, batches - (-room + nbytes - 1) // nbytes)
    samples = f"{most * job.evaluation.batch_size * job.world_size:,} samples"
    message = (
        f"evaluation keeps the predictions of all its batches on the device, {gib(nbytes)} more for each; the size of the set is not "
        f"known: predicted for {batches} batches, at most {most} ({samples}) would fit; eval_accumulation_steps bounds it"
    )
    return [Note("LG219", "warning", message, str(job.origin("evaluation.accumulation_steps")))]


def length_prediction(label: str, tokens: int, verdict: Verdict) -> LengthPrediction:
    worst = worst_rank(verdict.ranks)
    return LengthPrediction(label, tokens, worst.peak.device_bytes, verdict.verdict)


def with_lengths(verdict: Verdict, found: Sequence[LengthPrediction]) -> Verdict:
    """The verdict with what other batches of the data need, and which is the worst."""
    spec = verdict.job.lengths
    assert spec is not None
    table = ", ".join(f"{p.label} {p.tokens} tokens {gib(p.device_bytes)}{' (exceeds)' if p.verdict == 'exceeds' else ''}" for p in found)
    message = f"by length of a batch: {table}; {spec.worst}"
    severity = "warning" if len({p.verdict for p in found}) > 1 else "info"
    return dataclasses.replace(verdict, lengths=tuple(found), notes=(*verdict.notes, Note("LG271", severity, message, spec.source)))


def unknown_verdict(job: JobSpec, budget: DeviceBudget, reason: str) -> Verdict:
    """The verdict on a job that cannot be simulated."""
    return Verdict("unknown", job, budget, (), (), (), Confidence("low", (reason,)), UNKNOWN, job.notes, {})


def worst_rank(ranks: Sequence[RankPrediction]) -> RankPrediction:
    """The one that fails, else the one that needs most."""
    return max(ranks, key=lambda r: (r.oom is not None, r.peak.device_bytes))


def _confidence(job: JobSpec, trace: StepTrace) -> Confidence:
    doubts = [n for n in job.notes if n.code.startswith("LG3")]
    unmodelled = [n.message for n in doubts if n.severity != "info"]
    assumed = [n.message for n in job.notes if n.code.startswith("LG21") or n in doubts and n.severity == "info"]
    if trace.facts.get("value_reads"):
        assumed.append(f"forward reads values, taken as zero, at {', '.join(trace.facts['value_reads'][:3])}")
    reached = {e.a for e in trace.events if e.op is TraceOp.GRAD}
    idle = sum(p.requires_grad and i not in reached for i, p in enumerate(trace.params))
    if idle:
        assumed.append(f"{idle} trainable parameters get no gradient from the simulated batch (is a modality missing?)")
    if unmodelled:
        return Confidence("low", tuple(unmodelled + assumed))
    return Confidence("medium" if assumed else "high", tuple(assumed))


def host_budget(job: JobSpec) -> int | None:
    """Bytes of main memory that a node has for the job: as stated, else this machine's when the job's GPUs are here, else not known.
    Raises InputError for a size that is none."""
    if job.host_memory != "auto":
        try:
            return parse_bytes(job.host_memory)
        except ValueError:
            raise InputError(f"not a size: {job.host_memory!r}", where=str(job.origin("host_memory")), help="e.g. 512GiB") from None
    return host_memory(job.launch.environment)[0] if job.device == "auto" else None


def _hosts(job: JobSpec, trace: StepTrace, schedules: Sequence[RankSchedule]) -> tuple[HostPrediction, ...]:
    """The first node at its peak: it holds rank 0, so no node needs more."""
    phases = node_phases(job, trace, schedules)
    if not phases:
        return ()
    worst = max(phases, key=lambda h: sum(h.bytes_by_label.values()))
    budget = host_budget(job)
    over = [h.name for h in phases if budget is not None and sum(h.bytes_by_label.values()) > budget]
    return (HostPrediction(0, sum(worst.bytes_by_label.values()), worst.name, budget, worst.bytes_by_label, over[0] if over else None),)


def host_exceeds(node: HostPrediction) -> bool:
    """Does a node need more main memory than it is known to have?"""
    return node.budget_bytes is not None and node.peak_bytes > node.budget_bytes


def _host_causes(node: HostPrediction) -> list[Cause]:
    return [Cause("host", label, nbytes, "") for label, nbytes in sorted(node.breakdown.items(), key=lambda x: -x[1])]


# ---------------------------------------------------------------- causes
def causes_of(job: JobSpec, rank: RankPrediction) -> list[Cause]:
    """The breakdown at the peak, largest first, each with the setting that made it so large."""
    causes, reasons = [], {**_CAUSES, **_PHASE_CAUSES.get(rank.peak.name, {})}
    for category, nbytes in sorted(rank.breakdown.items(), key=lambda x: -x[1]):
        if nbytes <= 0:
            continue
        text, field_name = reasons[category](job)
        labels = bytes_by_label(rank, category)
        children = tuple(Cause(category, label, n, "") for label, n in labels[:3] if len(labels) > 1)
        causes.append(Cause(category, text, nbytes, describe_origin(job, field_name), children))
    return causes


def bytes_by_label(rank: RankPrediction, category: str) -> list[tuple[str, int]]:
    """Bytes of one category by label, largest first; layers that repeat are one ("model.layers.*.mlp")."""
    totals: dict[str, int] = {}
    for (c, label), nbytes in rank.timeline.live.items():
        if c.value == category:
            name = _LAYER_NUMBER.sub(".*", label)
            totals[name] = totals.get(name, 0) + nbytes
    return sorted(totals.items(), key=lambda x: -x[1])


def describe_origin(job: JobSpec, field_name: str) -> str:
    """ "ds_config.json:zero_optimization.stage = 1"; for a value nobody set: what it is by default, and whose default."""
    if not field_name:
        return ""
    value = job.get(field_name)
    if field_name == "allocator_conf" and not value:
        return "PYTORCH_CUDA_ALLOC_CONF is not set"
    return f"{job.origin(field_name)} = {'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def _sharding_field(job: JobSpec) -> str:
    if job.strategy == "zero":
        return "zero.stage"
    if job.strategy in ("fsdp1", "fsdp2"):
        return "fsdp.sharding_strategy" if job.strategy == "fsdp1" else "fsdp.reshard_after_forward"
    return "strategy"


def _is_sharded(job: JobSpec, zero_stage: int) -> bool:
    if job.strategy == "zero" and job.zero is not None:
        return job.zero.stage >= zero_stage and job.world_size > 1
    return job.strategy in ("fsdp1", "fsdp2") and job.world_size > 1 and (job.fsdp is None or job.fsdp.sharding_strategy != "NO_SHARD")


def _parameters_cause(job: JobSpec) -> tuple[str, str]:
    if _is_sharded(job, 3):
        return f"parameters are sharded over {job.world_size} ranks and gathered to compute", _sharding_field(job)
    return ("parameters are replicated on every rank" if job.world_size > 1 else "parameters are whole on the device"), _sharding_field(job)


def _gradients_cause(job: JobSpec) -> tuple[str, str]:
    sharded = _is_sharded(job, 2)
    if sharded and job.gradient_accumulation_steps > 1 and job.strategy == "fsdp2":
        return "full gradients are kept while they accumulate", "gradient_accumulation_steps"
    return ("gradients are sharded" if sharded else "gradients are kept whole"), _sharding_field(job)


def _optimizer_cause(job: JobSpec) -> tuple[str, str]:
    if _is_sharded(job, 1):
        return f"{job.optimizer.name} states are sharded over {job.world_size} ranks", _sharding_field(job)
    what = "replicated on every rank" if job.world_size > 1 else "whole on the device"
    return f"{job.optimizer.name} states are {what}", _sharding_field(job) if job.world_size > 1 else "optimizer.name"


def _activations_cause(job: JobSpec) -> tuple[str, str]:
    size = f"micro-batch {job.micro_batch_size} x {job.seq_len}"
    if not job.activation_checkpointing.enabled:
        return f"activations of every layer are kept ({size})", "activation_checkpointing.enabled"
    return f"checkpointed activations ({size})", "micro_batch_size"


def _communication_cause(job: JobSpec) -> tuple[str, str]:
    return "communication buffers", "zero.reduce_bucket_size" if job.strategy == "zero" else ""


def _temporaries_cause(job: JobSpec) -> tuple[str, str]:
    return f"temporaries of backward, loss and step ({job.micro_batch_size} x {job.seq_len} tokens)", "micro_batch_size"


def _overhead_cause(job: JobSpec) -> tuple[str, str]:
    return "CUDA context, workspaces and allocator fragmentation", "allocator_conf"


def _predictions_cause(job: JobSpec) -> tuple[str, str]:
    loss_only = job.evaluation is None or job.evaluation.loss_only
    return ("batch of the evaluation", "") if loss_only else ("predictions of evaluation batches are kept", "evaluation.accumulation_steps")


def _evaluation_cause(job: JobSpec) -> tuple[str, str]:
    size = job.evaluation.batch_size if job.evaluation else 0
    return f"temporaries of an evaluation batch ({size} x {job.seq_len} tokens)", "evaluation.batch_size"


def _gathered_cause(job: JobSpec) -> tuple[str, str]:
    zero = job.strategy == "zero"
    return "the state dict is gathered", "zero.stage3_gather_16bit_weights_on_model_save" if zero else "fsdp.state_dict_type"


_PHASE_CAUSES: dict[str, dict[str, Callable[[JobSpec], tuple[str, str]]]] = {
    "evaluation": {"activations": _predictions_cause, "temporaries": _evaluation_cause},
    "save": {"communication": _gathered_cause},
}
_CAUSES: dict[str, Callable[[JobSpec], tuple[str, str]]] = {
    "parameters": _parameters_cause,
    "gradients": _gradients_cause,
    "optimizer_states": _optimizer_cause,
    "activations": _activations_cause,
    "communication": _communication_cause,
    "temporaries": _temporaries_cause,
    "overhead": _overhead_cause,
}
