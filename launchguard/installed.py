"""Versions of installed libraries, without importing them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import metadata


@functools.cache
def version_of(distribution: str) -> str | None:
    """Installed version of a distribution; None when it is not installed. Asked often, and each answer parses a METADATA file."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str, parts: int = 2) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13), with 3 parts (2, 13, 0)."""
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")]
    return tuple([*numbers, *[0] * parts][:parts])


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {name: version_of(name) for name in distributions}
    return {name: version for name, version in found.items() if version is not None}
