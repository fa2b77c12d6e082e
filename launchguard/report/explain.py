"""Pages of `launchguard explain`: one Markdown file per code in pages/, its first line the title."""

from __future__ import annotations

from pathlib import Path

from launchguard.errors import InputError

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
