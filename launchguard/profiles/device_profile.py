"""Devices: what a card offers, and what its process costs before the first tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from launchguard.errors import InputError
from launchguard.profiles.reading import profile_names, read_profile, unknown_name
from launchguard.units import GIB, MIB, parse_bytes

# Kernels, cuBLAS, cuDNN and Triton modules load lazily and add 0.05-0.3 GiB to the bare context by mid-training
# (process total - allocated - reserved of public out-of-memory texts against bare contexts): the middle, and the spread.
_KERNELS_BYTES = int(0.15 * GIB)
_KERNELS_HIGH_BYTES = int(0.30 * GIB)

# torch's default cuBLAS workspace, one per handle and stream, through the caching allocator. Read from torch 2.13 and 2.14
# binaries: ":4096:2:16:8" = 2 x 4096 KiB + 8 x 16 KiB below compute capability 9.0, 32 MiB from there on.
_CUBLAS_WORKSPACE_BYTES = 8_519_680
_CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
_HIPBLASLT_WORKSPACE_BYTES = 76 * MIB  # pytorch PR 139300; not checked on a card

_SMALLEST_DEVICE_BYTES = GIB // 4
_LARGEST_DEVICE_BYTES = 4096 * GIB
_HELP = "list the known devices with: launchguard devices; or give a size: --device 24GiB"


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of card.

    id: file name in profiles/devices; compute_capability: None where there is no such thing (AMD, Intel);
    total_bytes: what the driver reports as total, the lowest seen; context_bytes: CUDA context with its kernels during training, outside
    every torch counter, context_low..context_high its interval; sms: multiprocessors (compute units);
    max_threads_per_sm: decides the scratch of reductions; cublas_workspace_bytes: per (handle, stream), inside torch's allocator;
    interconnect: "nvlink" | "xgmi" | "pcie" | "vendor" between the cards of a node; source: who printed these figures ("idx N": file N of
    a public index of code text, found by exact string).
    """

    id: str
    name: str
    vendor: str
    compute_capability: tuple[int, int] | None
    total_bytes: int
    context_bytes: int
    context_low: int
    context_high: int
    sms: int
    max_threads_per_sm: int
    cublas_workspace_bytes: int
    interconnect: str
    source: str
    aliases: tuple[str, ...] = ()


def context_interval(bare_gib: float, training_gib: float) -> tuple[int, int, int]:
    """(expected, low, high) bytes of a context, from the bare one and the largest seen in training, in GiB.

    Expected: bare + 0.15 GiB for kernels; low: bare; high: the larger of bare + 0.30 GiB and what was seen.
    """
    bare = int(bare_gib * GIB)
    return bare + _KERNELS_BYTES, bare, max(bare + _KERNELS_HIGH_BYTES, int(training_gib * GIB))


def cublas_workspace_bytes(vendor: str, compute_capability: tuple[int, int] | None) -> int:
    """Bytes of one BLAS workspace as torch allocates it by default."""
    if vendor == "amd":
        return _HIPBLASLT_WORKSPACE_BYTES
    if compute_capability is None:
        return 0
    return _CUBLAS_WORKSPACE_HOPPER_BYTES if compute_capability >= (9, 0) else _CUBLAS_WORKSPACE_BYTES


@cache
def device(name: str) -> DeviceProfile:
    """The profile of a device by id, marketing name or nvidia-smi name in any case and spacing; or an anonymous one of a size
    ("24GiB"), with compute capability 8.0. InputError for a name that nobody knows."""
    key = name.strip().lower()
    if key in profile_names("devices"):
        return _read(key)
    size = _size(name)
    if size is not None:
        return _anonymous(name, size)
    normal = _normal(name)
    for profile in devices():
        if normal in {_normal(alias) for alias in (profile.id, profile.name, *profile.aliases)}:
            return profile
    variants = [profile.id for profile in devices() if normal and profile.id.startswith(f"{normal}-")]
    if variants:
        raise InputError(f"device {name!r} comes in more than one size: {', '.join(variants)}", help=_HELP)
    known = {alias.lower(): None for profile in devices() for alias in (profile.id, *profile.aliases)}
    raise unknown_name("device", name, known, _HELP)


@cache
def devices() -> tuple[DeviceProfile, ...]:
    """Every known device, by id. Parses all files: for listings and for names that are no id."""
    return tuple(_read(key) for key in profile_names("devices"))


@cache
def _read(key: str) -> DeviceProfile:
    data = read_profile(f"devices/{key}.yaml")
    vendor, architecture = data["vendor"], str(data["architecture"])
    capability = _capability(architecture) if vendor == "nvidia" else None
    expected, low, high = context_interval(*data["context_gib"])
    return DeviceProfile(
        id=key,
        name=data["name"],
        vendor=vendor,
        compute_capability=capability,
        total_bytes=int(data["capacity_gib"] * GIB),
        context_bytes=expected,
        context_low=low,
        context_high=high,
        sms=data["sms"],
        max_threads_per_sm=data["max_threads_per_sm"],
        cublas_workspace_bytes=cublas_workspace_bytes(vendor, capability),
        interconnect=data["interconnect"],
        source=data["source"],
        aliases=tuple(data.get("aliases", ())),
    )


def _capability(architecture: str) -> tuple[int, int]:
    major, _, minor = architecture.partition(".")
    return int(major), int(minor)


def _normal(name: str) -> str:
    """Spelling that all writings of a card's name share: "NVIDIA A100-SXM4-80GB" -> "a100sxm480gb"."""
    words = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|intel|gpu)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9.]", "", words)


def _size(text: str) -> int | None:
    try:
        size = parse_bytes(text)
    except ValueError:
        return None
    if _SMALLEST_DEVICE_BYTES <= size <= _LARGEST_DEVICE_BYTES:
        return size
    # "3090" is a card and not bytes, and so is "2080 Ti"; "100MiB" is neither
    if text.strip().isdigit() or size > _LARGEST_DEVICE_BYTES:
        return None
    raise InputError(f"a device of {text.strip()} is smaller than its own CUDA context", where="--device", help=_HELP)


def _anonymous(text: str, size: int) -> DeviceProfile:
    """A card of which only the bytes are known: everything else as an A100, the least assuming of the common ones."""
    expected, low, high = context_interval(0.30, 0.73)
    return DeviceProfile(
        id=text.strip(),
        name=f"device of {text.strip()}",
        vendor="nvidia",
        compute_capability=(8, 0),
        total_bytes=size,
        context_bytes=expected,
        context_low=low,
        context_high=high,
        sms=108,
        max_threads_per_sm=2048,
        cublas_workspace_bytes=_CUBLAS_WORKSPACE_BYTES,
        interconnect="nvlink",
        source="size given by the user; compute capability 8.0 assumed",
    )
