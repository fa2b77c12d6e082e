"""Byte units. Everything inside launchguard is an int of bytes; text is made and read here only."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

_DTYPE_ALIASES = {
    "fp32": "float32", "float": "float32", "single": "float32", "fp64": "float64", "double": "float64",
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "long": "int64", "int": "int32",
}  # fmt: skip

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def dtype_name(text: str) -> str:
    """Canonical dtype name ("bf16", "torch.bfloat16" -> "bfloat16"). Raises ValueError for an unknown one."""
    name = text.strip().removeprefix("torch.").lower()
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {text!r}; known: {', '.join(sorted(DTYPE_BYTES))}")
    return name


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a canonical dtype name."""
    return DTYPE_BYTES[name]


def parse_bytes(text: str) -> int:
    """ "6GiB", "6g", "512MiB", "80GB", "1000" -> bytes ("GB" is 10^9, "G" and "GiB" are 2^30). Raises ValueError."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"not a size: {text!r} (examples: 6GiB, 512MiB, 80GB)")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
    return int(float(number) * (1000 if decimal else 1024) ** power)


def gib(nbytes: int, digits: int = 1) -> str:
    """Bytes as text: "41.2 GiB"; below 0.1 GiB "12.5 MiB"."""
    if 0 < abs(nbytes) < GIB // 10:
        return f"{nbytes / MIB:.{digits}f} MiB"
    return f"{nbytes / GIB:.{digits}f} GiB"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= n."""
    return ceil_div(n, multiple) * multiple
