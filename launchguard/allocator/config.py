"""PYTORCH_CUDA_ALLOC_CONF, read as torch reads it: what torch would refuse is an InputError here, before the job is queued.

Rules and limits as in torch 2.13 and 2.14 (c10/core/AllocatorConfig.h and the error texts of those builds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launchguard.errors import InputError
from launchguard.units import MIB

LARGE_SEGMENT_MIB = 20
ROUNDUP_INTERVALS = 16  # of sizes: 1 MiB, 2 MiB, ... 32 GiB and above

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_HELP = "see the keys of PYTORCH_CUDA_ALLOC_CONF in torch's notes on CUDA memory management"

# Keys that torch knows and that move no device byte of a training step.
_WITHOUT_EFFECT = frozenset({"release_lock_on_cudamalloc", "throw_on_cudamalloc_oom", "graph_capture_record_stream_reuse"})
_PINNED = "pinned_"  # of the host allocator, all of them


@dataclass(frozen=True)
class AllocatorConfig:
    """Settings of one allocator.

    large_segment_size, max_split_size, max_non_split_rounding: bytes; max_split_size None: no limit;
    garbage_collection_threshold, per_process_memory_fraction: shares of the limit and of the device's total; roundup_divisions: by
    size interval, empty when requests are rounded to 512 bytes only; backend: "native", or one that is not modelled.
    """

    large_segment_size: int = LARGE_SEGMENT_MIB * MIB
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT_MIB * MIB
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    expandable_segments: bool = False
    roundup_divisions: tuple[int, ...] = field(default=())
    backend: str = "native"


def alloc_conf(environ: Mapping[str, str]) -> tuple[str, str]:
    """(setting, variable it stands in) of an environment; ("", "") without one. PYTORCH_CUDA_ALLOC_CONF wins over PYTORCH_ALLOC_CONF
    when both are set (torch 2.14.1), whatever the header says."""
    for variable in _VARIABLES:
        if environ.get(variable):
            return environ[variable], variable
    return "", ""


def parse_conf(text: str) -> AllocatorConfig:
    """The configuration of a setting ("max_split_size_mb:128,expandable_segments:True"). InputError for an unknown key or bad value."""
    values: dict[str, Any] = {}
    for key, value in _pairs(text):
        reader = _READERS.get(key)
        if reader is not None:
            values[_FIELDS.get(key, key)] = reader(key, value)
        elif key not in _WITHOUT_EFFECT and not key.startswith(_PINNED):
            raise _error(key, value, "is no key of this torch", f"known: {', '.join(sorted(_READERS))}")
    large = values.setdefault("large_segment_size", LARGE_SEGMENT_MIB * MIB)
    rounding = values.setdefault("max_non_split_rounding", large)
    split = values.get("max_split_size")
    if split is not None and split < large:
        raise _error("max_split_size_mb", split // MIB, f"is too small, torch wants at least {large // MIB}")
    if rounding < large:
        raise _error("max_non_split_rounding_mb", rounding // MIB, f"is too small, torch wants at least {large // MIB}")
    return AllocatorConfig(**values)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """key:value pairs of a setting; commas inside brackets belong to a value."""
    depth, item, items = 0, "", []
    for char in text.replace(" ", ""):
        if char == "," and depth == 0:
            items.append(item)
            item = ""
            continue
        depth += (char == "[") - (char == "]")
        item += char
    for pair in [*items, item]:
        key, colon, value = pair.partition(":")
        if pair and not (key and colon and value):
            raise _error(key or pair, value, "is no key:value pair")
        if pair:
            yield key, value


def _error(key: str, value: object, fact: str, help: str = _HELP) -> InputError:
    return InputError(f"{key}:{value} {fact}", where="PYTORCH_CUDA_ALLOC_CONF", help=help)


# ---------------------------------------------------------------- one reader per kind of value
def _number(key: str, value: str) -> int:
    if not value.isdigit():
        raise _error(key, value, "is no whole number")
    return int(value)


def _mebibytes(key: str, value: str) -> int:
    return _number(key, value) * MIB


def _large_segment(key: str, value: str) -> int:
    size = _number(key, value)
    if size <= 10:
        raise _error(key, value, "is too small, torch wants more than 10")
    return size * MIB


def _share(key: str, value: str, *, open_interval: bool) -> float:
    try:
        share = float(value)
    except ValueError:
        raise _error(key, value, "is no number") from None
    if not (0.0 < share < 1.0 if open_interval else 0.0 <= share <= 1.0):
        raise _error(key, value, "is not between 0 and 1")
    return share


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _error(key, value, "is neither True nor False")
    return value == "True"


def _backend(key: str, value: str) -> str:
    if value not in ("native", "cudaMallocAsync"):
        raise _error(key, value, "is no allocator of torch", "known: native, cudaMallocAsync")
    return value


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Divisions by size interval: one number for all, or a list [256:1,512:2,>:8] keyed by MiB."""
    if not value.startswith("["):
        return (_power_of_two(key, value),) * ROUNDUP_INTERVALS
    divisions, last, first = [0] * ROUNDUP_INTERVALS, 0, True
    for item in value.strip("[]").split(","):
        size, _, text = item.partition(":")
        count = _power_of_two(key, text)
        if size == ">":
            divisions[last + 1 :] = [count] * (ROUNDUP_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key, size).bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if first:  # smaller sizes take what the first key says
            divisions[:last] = [count] * last
            first = False
        divisions[last] = count
    return tuple(divisions)


def _power_of_two(key: str, value: str) -> int:
    number = _number(key, value)
    if number <= 0 or number & (number - 1):
        raise _error(key, value, "is no power of two")
    return number


_FIELDS = {
    "large_segment_size_mb": "large_segment_size", "max_split_size_mb": "max_split_size",
    "max_non_split_rounding_mb": "max_non_split_rounding", "roundup_power2_divisions": "roundup_divisions",
}  # fmt: skip

_READERS: dict[str, Callable[[str, str], Any]] = {
    "large_segment_size_mb": _large_segment,
    "max_split_size_mb": _mebibytes,
    "max_non_split_rounding_mb": _mebibytes,
    "garbage_collection_threshold": lambda key, value: _share(key, value, open_interval=True),
    "per_process_memory_fraction": lambda key, value: _share(key, value, open_interval=False),
    "expandable_segments": _truth,
    "roundup_power2_divisions": _divisions,
    "backend": _backend,
}
