"""`launchguard explain`: pages, one Markdown file per code in pages/ with the title as its first line; and what is alive at the peak."""

from __future__ import annotations

from pathlib import Path

from launchguard.errors import InputError
from launchguard.report.wording import CATEGORIES, gib, place, rank_names
from launchguard.verdict import Verdict, bytes_by_label, worst_rank

PAGES = Path(__file__).parent / "pages"
_KINDS = {"1": "verdicts", "2": "what the configuration really means, or why it is refused", "3": "not modelled", "4": "advice"}


def codes() -> list[str]:
    """Every code that has a page, sorted."""
    return sorted(path.stem for path in PAGES.glob("LG*.md"))


def title(code: str) -> str:
    """ "# LG248: nothing to shard" -> "nothing to shard"."""
    return (PAGES / f"{code}.md").read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]


def page(code: str) -> str:
    """The page of a code in any case, with or without brackets. Raises InputError for a code without one."""
    name = code.strip("[]").upper()
    name = name if name.startswith("LG") else f"LG{name}"
    if name not in codes():
        near = [known for known in codes() if known[:4] == name[:4]]
        raise InputError(f"there is no code {code}", where="launchguard explain",
                         help=f"{', '.join(near[:8])} ..." if near else "launchguard explain lists all codes")  # fmt: skip
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def listing() -> str:
    """All codes with their titles, by kind."""
    lines: list[str] = []
    for digit, kind in _KINDS.items():
        found = [code for code in codes() if code[2] == digit]
        lines += [*([""] if lines else []), f"LG{digit}xx: {kind}", *(f"  {code}  {title(code)}" for code in found)]
    return "\n".join(lines) + "\n"


def peak(verdict: Verdict) -> str:
    """Everything alive at the allocated peak of the worst rank, largest first; layers that repeat are one line."""
    if not verdict.ranks:
        return f"nothing could be simulated: {'; '.join(verdict.confidence.reasons)}\n"
    rank = worst_rank(verdict.ranks)
    timeline = rank.timeline
    where = place(timeline.phase, timeline.module)
    lines = [f"{rank_names(rank.ranks, verdict.job.device_word)}: {gib(timeline.allocated_bytes, 2)} allocated in {where}", ""]
    alive = {category: [entry for entry in bytes_by_label(rank, category) if entry[1]] for category in CATEGORIES}
    for category, entries in sorted(alive.items(), key=lambda item: -sum(nbytes for _, nbytes in item[1])):
        if entries:
            lines.append(f"{gib(sum(nbytes for _, nbytes in entries), 2):>12}  {category.replace('_', ' ')}")
            lines += [f"{gib(nbytes, 2):>12}    {label}" for label, nbytes in entries]
    outside = rank.peak.device_bytes - timeline.allocated_bytes
    return "\n".join([*lines, f"{gib(outside, 2):>12}  outside: free cached blocks, CUDA context, communication library"]) + "\n"
