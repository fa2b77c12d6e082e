"""Reading of profile files: one YAML per X, its file name is the key, parsed when it is asked for and only then."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from launchguard.errors import InputError

_ROOT = Path(__file__).parent


@cache
def read_profile(relative: str) -> dict[str, Any]:
    """The parsed file `relative` to this room ("devices/t4.yaml"). FileNotFoundError when there is none."""
    import yaml  # 15 ms: not for those who only want --help

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with open(_ROOT / relative, encoding="utf-8") as file:
        content = yaml.load(file, Loader=loader)
    if not isinstance(content, dict) or not content.get("source"):
        raise ValueError(f"profile {relative} is no mapping or names no source")
    return content


@cache
def profile_names(folder: str) -> tuple[str, ...]:
    """Keys of a folder of profiles, sorted; nothing is parsed."""
    return tuple(sorted(path.stem for path in (_ROOT / folder).glob("*.yaml")))


def unknown_name(kind: str, name: str, known: Iterable[str], help: str) -> InputError:
    """The error for a name nobody knows, with the nearest ones that somebody does."""
    close = difflib.get_close_matches(name.lower(), [*known], n=4, cutoff=0.5)
    nearest = f"; nearest: {', '.join(close)}" if close else ""
    return InputError(f"unknown {kind} {name!r}{nearest}", help=help)
