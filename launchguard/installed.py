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


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {name: version_of(name) for name in distributions}
    return {name: version for name, version in found.items() if version is not None}
