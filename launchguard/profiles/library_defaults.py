"""Defaults of training libraries, for a host where the library itself is not installed: the launch node of a cluster, a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from launchguard.profiles.reading import profile_names, read_profile, unknown_name


@dataclass(frozen=True)
class LibraryDefaults:
    """values: dotted key in the library's own spelling -> default; only keys that change memory, batch or process counts."""

    library: str
    version: str
    source: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"default of {self.library} {self.version}"


@cache
def library_defaults(library: str) -> LibraryDefaults:
    """Defaults of "deepspeed", "accelerate" or "transformers" as of the version they were read in. InputError when unknown."""
    names = profile_names("defaults")
    if library not in names:
        raise unknown_name("library", library, names, "known: " + ", ".join(names))
    data = read_profile(f"defaults/{library}.yaml")
    return LibraryDefaults(library, str(data["version"]), data["source"], data["values"])
