"""The report for people: the fact, because of what, and what helps; then what really will run, and the figures behind it.

Lower case, no closing period, readable without colour. Lines that state the answer are never wrapped; tables keep to `width`.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from textwrap import shorten

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from launchguard.job import JobSpec
from launchguard.report.wording import (
    CATEGORIES,
    effective_configuration,
    gib,
    grouped_ranks,
    phase_name,
    place,
    rank_names,
    telling_digits,
)
from launchguard.verdict import Advice, Cause, Change, HostPrediction, RankPrediction, Verdict, host_exceeds, next_limit, worst_rank

_SHOWN_CAUSES = 8
# Defaults that decide the bytes are shown too; the others are in the JSON report.
_ALWAYS_SHOWN = frozenset({
    "micro_batch_size", "gradient_accumulation_steps", "seq_len", "activation_checkpointing.enabled", "optimizer.name",
    "optimizer.implementation", "precision.load", "zero.stage", "zero.reduce_bucket_size", "fsdp.version", "fsdp.sharding_strategy",
    "fsdp.reshard_after_forward",
})  # fmt: skip
_SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
_SEVERITY_WORDS = {"error": "error", "warning": "warning", "info": "note"}


def render(verdict: Verdict, advice: Sequence[Advice], *, color: bool, width: int) -> str:
    """The whole report as text that ends with a newline. width: columns that tables may fill."""
    parts: list[RenderableType] = [*_answer(verdict, advice)]
    parts += ["", _configuration(verdict)]  # before the figures: what really will run
    notes = _notes(verdict)
    if notes:
        parts += ["", *notes]
    if verdict.ranks:
        parts += ["", *_rank_tables(verdict)]
    parts += ["", *_background(verdict)]
    return _print(parts, color=color, width=width)


def render_answer(verdict: Verdict, advice: Sequence[Advice], *, color: bool, width: int) -> str:
    """The answer alone: the headline, its causes and what helps. For --quiet and for `run` in front of a job's own output."""
    return _print(_answer(verdict, advice), color=color, width=width)


def _print(parts: Sequence[RenderableType], *, color: bool, width: int) -> str:
    out = StringIO()
    console = Console(
        file=out, force_terminal=color, color_system="standard" if color else None, no_color=not color,
        width=width, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    for part in parts:
        # tables are laid out for the width, sentences are left to the terminal: a broken line cannot be searched for
        console.print(part, soft_wrap=isinstance(part, (str, Text)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


# ---------------------------------------------------------------- the answer
def _answer(verdict: Verdict, advice: Sequence[Advice]) -> list[RenderableType]:
    lines: list[RenderableType] = [*_headlines(verdict)]
    if verdict.verdict == "exceeds":
        lines += _causes(verdict.causes)
    return lines + _help(advice)


def _headlines(verdict: Verdict) -> list[Text]:
    worst = worst_rank(verdict.ranks) if verdict.ranks else None
    failures = [note for note in verdict.notes if note.code == "LG105"]
    if failures:
        return [_labelled("error[LG105]", "bold red", note.message + (f"\n  at {note.origin}" if note.origin else "")) for note in failures]
    if verdict.verdict == "unknown" or worst is None:
        reason = verdict.confidence.reasons[0] if verdict.confidence.reasons else "nothing could be simulated"
        return [_labelled("warning[LG103]", "bold yellow", f"cannot tell whether this job fits: {reason}")]
    lines = []
    if verdict.verdict == "fits":
        lines.append(_labelled("fits", "bold green", _fits(verdict, worst)))
        return lines
    on_host = [_labelled("error[LG102]", "bold red", _host_exceeds(node)) for node in verdict.host if host_exceeds(node)]
    if not on_host or worst.oom is not None:
        lines.append(_labelled("error[LG101]", "bold red", f"{_needs(verdict, worst)}; {_offers(verdict, worst.peak.device_bytes)}"))
        lines += _out_of_memory(worst)
    return lines + on_host


def _labelled(label: str, style: str, text: str) -> Text:
    return Text.assemble((f"{label}:", style), " ", text)


def _needs(verdict: Verdict, rank: RankPrediction) -> str:
    digits = telling_digits(rank.peak.device_bytes, verdict.device.budget_bytes)
    count, word = verdict.job.devices, verdict.job.device_word
    who = f"the only {word}" if count == 1 else f"{word} {rank.ranks[0]} of {count}"
    return f"{who} needs {gib(rank.peak.device_bytes, digits)} in {place(rank.peak.name, rank.peak.module)}"


def _offers(verdict: Verdict, against: int) -> str:
    device = verdict.device
    digits = telling_digits(against, device.budget_bytes)
    usable = gib(device.usable_bytes, digits).removesuffix(" GiB")
    asked = verdict.job.headroom
    headroom = f" - {asked if asked.endswith('%') else gib(device.headroom_bytes, digits)} headroom" if device.headroom_bytes else ""
    return f"{device.name} offers {gib(device.budget_bytes, digits)} ({usable} usable{headroom})"


def _fits(verdict: Verdict, rank: RankPrediction) -> str:
    spare = verdict.device.budget_bytes - rank.peak.device_bytes
    return f"{_needs(verdict, rank)}; {_offers(verdict, rank.peak.device_bytes)}; {gib(spare)} to spare"


def _out_of_memory(rank: RankPrediction) -> list[Text]:
    oom = rank.oom
    if oom is None:
        return []
    tried = f"tried to allocate {gib(oom.requested_bytes)} for {oom.label} with {gib(oom.allocated_bytes)} allocated"
    return [Text(f"  it would fail in {place(oom.phase, oom.module)}: {tried} and {gib(oom.reserved_bytes)} reserved")]


def _host_exceeds(node: HostPrediction) -> str:
    budget = node.budget_bytes or 0
    digits = telling_digits(node.peak_bytes, budget)
    return f"node {node.node} needs {gib(node.peak_bytes, digits)} of host memory in {phase_name(node.phase)}; it has {gib(budget, digits)}"


def _causes(causes: Sequence[Cause]) -> list[Text]:
    rows = [(f"{'because' if i == 0 else 'and':>9} {cause.text}", gib(cause.nbytes), cause) for i, cause in enumerate(causes)]
    shown = []
    for text, size, cause in rows[:_SHOWN_CAUSES]:
        shown.append((text, size, cause.origin))
        shown += [(f"{'':>12}{child.text}", gib(child.nbytes), child.origin) for child in cause.children]
    if len(rows) > _SHOWN_CAUSES:
        rest = causes[_SHOWN_CAUSES:]
        shown.append((f"{'and':>9} {len(rest)} smaller causes", gib(sum(cause.nbytes for cause in rest)), ""))
    text_width = max((len(text) for text, _, _ in shown), default=0)
    return [Text(f"{text:<{text_width}}  {size:>9}   {origin}".rstrip()) for text, size, origin in shown]


def _help(advice: Sequence[Advice]) -> list[RenderableType]:
    title_width = max((len(piece.title) for piece in advice), default=0)
    effects = [_effect(piece) for piece in advice]
    effect_width = max(map(len, effects), default=0)
    return [
        _labelled("help", "bold cyan", f"{piece.title:<{title_width}}  {effect:<{effect_width}}   {_where(piece)}".rstrip())
        for piece, effect in zip(advice, effects)
    ]


def _effect(piece: Advice) -> str:
    price = ", ".join(filter(None, (piece.safety, piece.cost)))
    return f"-> {gib(piece.device_bytes)}, {'fits' if piece.fits else 'still too much'} [{price}]"


def _where(piece: Advice) -> str:
    return "; ".join(dict.fromkeys(_change(change, piece.title) for change in piece.changes))


def _change(change: Change, title: str) -> str:
    """The file, with the key unless the title has just said it, and the new value unless it is a bare switch."""
    if change.key in title:
        return change.file
    if change.new is True and change.key.startswith("-"):
        return f"{change.file}: {change.key}"
    return f"{change.file}: {change.key} = {_value(change.new)}"


# ---------------------------------------------------------------- the figures
def _rank_tables(verdict: Verdict) -> list[RenderableType]:
    groups = grouped_ranks(verdict.ranks)
    worst = worst_rank(groups)
    parts: list[RenderableType] = []
    if len(groups) > 1:
        parts += [_summary(groups, verdict.job), ""]
    columns = Table.grid(padding=(0, 4))
    columns.add_row(_phases(worst, verdict.job), _breakdown(worst))
    return [*parts, columns]


def _table(*headings: str, title_left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < title_left else "right", no_wrap=True)
    return table


def _summary(groups: Sequence[RankPrediction], job: JobSpec) -> Table:
    table = _table(f"{job.devices} {job.device_word}s (GiB)", "peak in", "allocated", "reserved", "device", title_left=2)
    for rank in groups:
        peak = rank.peak
        sizes = _sizes(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        table.add_row(Text(rank_names(rank.ranks, job.device_word)), Text(place(peak.name, peak.module)), *sizes)
    return table


def _phases(rank: RankPrediction, job: JobSpec) -> Table:
    title = rank_names(rank.ranks, job.device_word) + (f" of {job.devices} (GiB)" if job.devices > 1 else " (GiB)")
    table = _table(title, "allocated", "reserved", "device")
    for phase in rank.phases:
        mark = " (peak)" if phase.name == rank.peak.name else ""
        style = "bold" if mark else ""
        table.add_row(
            Text(phase_name(phase.name) + mark), *_sizes(phase.allocated_bytes, phase.reserved_bytes, phase.device_bytes), style=style
        )
    return table


def _breakdown(rank: RankPrediction) -> Table:
    table = _table("at the peak", "GiB", "share")
    total = max(1, rank.peak.device_bytes)
    for category in CATEGORIES:
        nbytes = rank.breakdown.get(category, 0)
        table.add_row(category.replace("_", " "), *_sizes(nbytes), f"{100 * nbytes / total:.0f} %")
    return table


def _sizes(*sizes: int) -> list[str]:
    """Figures of a table, all in GiB with two digits, so that a column can be compared at a glance."""
    return [f"{nbytes / (1 << 30):.2f}" for nbytes in sizes]


def _background(verdict: Verdict) -> list[Text]:
    """Device, host, interval and confidence: one line each."""
    low, high = verdict.interval.device
    device = verdict.device
    offered = f"{gib(device.usable_bytes)} usable, {gib(device.budget_bytes)} after headroom"
    lines = [_fact("device", f"{device.name}, {offered} ({shorten(device.source, 60, placeholder=' ...')})")]
    for node in verdict.host:
        budget = f"of {gib(node.budget_bytes)}" if node.budget_bytes is not None else "(what the node has is not known)"
        lines.append(_fact("host", f"node {node.node} needs {gib(node.peak_bytes)} {budget} in {phase_name(node.phase)}"))
    if verdict.ranks:
        lines.append(_fact("peak", _peak(worst_rank(verdict.ranks))))
        if high:
            least, most = verdict.interval.allocated
            lines.append(_fact("interval", f"{gib(low)} to {gib(high)} on the worst rank's device, {gib(least)} to {gib(most)} allocated"))
    reasons = f": {'; '.join(verdict.confidence.reasons)}" if verdict.confidence.reasons else ""
    return [*lines, _fact("confidence", f"{verdict.confidence.level}{reasons}")]


def _peak(rank: RankPrediction) -> str:
    """Where the peak is, and the next limit after it."""
    text = f"{phase_name(rank.peak.name)}, {gib(rank.peak.allocated_bytes)} allocated"
    after = next_limit(rank)
    return text if after is None else f"{text}; next: {phase_name(after.name)} at {gib(after.allocated_bytes)}"


def _fact(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<12}", "bold"), text)


def _configuration(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("effective configuration", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("set by", overflow="fold")
    hidden = 0
    for entry in effective_configuration(verdict.job):
        if entry.origin.startswith("default of") and entry.field not in _ALWAYS_SHOWN:
            hidden += 1
            continue
        table.add_row(Text(entry.field), Text(_value(entry.value)), Text(entry.origin))
    if hidden:
        table.add_row(Text(f"({hidden} library defaults, see --json)"), Text(""), Text(""))
    return table


def _value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_value(item)}" for key, item in value.items()) or "none"
    return str(value)


def _notes(verdict: Verdict) -> list[Text]:
    return [
        _labelled(
            f"{_SEVERITY_WORDS[note.severity]}[{note.code}]", _SEVERITY_STYLES[note.severity],
            note.message + (f" ({note.origin})" if note.origin else ""),
        )
        for note in verdict.notes
        if note.code != "LG105"  # the headline
    ]  # fmt: skip
