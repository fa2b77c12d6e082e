"""The devices of this node, through NVML: no CUDA context is made, so the question costs no device memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launchguard.errors import InputError
from launchguard.profiles.device_profile import DeviceProfile, cublas_workspace_bytes, device


@dataclass(frozen=True)
class DetectedDevice:
    """A card in this node. profile: of its name, with the live total; free_bytes: what the driver can give now; index: NVML's."""

    profile: DeviceProfile
    free_bytes: int
    index: int


def detect(environ: Mapping[str, str] | None = None) -> list[DetectedDevice]:
    """Devices that a process started here would see, in its own order (CUDA_VISIBLE_DEVICES is honoured); empty without NVML or a GPU."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        visible = visible_indices((os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES"), uuids)
        return [_describe(pynvml, handles[i], i) for i in visible]
    except pynvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_indices(setting: str | None, uuids: list[str]) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES leaves, in its order. As CUDA reads it: the first entry that names no device ends the list."""
    if setting is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            index = int(entry)
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
            if len(matches) != 1:
                break
            index = matches[0]
        if index in indices:  # CUDA refuses a list that names a device twice, and then sees none
            return []
        indices.append(index)
    return indices


def _describe(nvml: Any, handle: Any, index: int) -> DetectedDevice:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = _text(nvml.nvmlDeviceGetName(handle))
    try:
        known = device(name)
        # NVML's total includes what the driver keeps; torch's total, the one profiles hold, does not. ECC and MIG make it smaller.
        total = min(int(memory.total), known.total_bytes)
        profile = dataclasses.replace(known, name=name, total_bytes=total, source=f"NVML; {known.source}")
    except InputError:
        profile = _unlisted(nvml, handle, name, int(memory.total))
    return DetectedDevice(profile, min(int(memory.free), profile.total_bytes), index)


def _unlisted(nvml: Any, handle: Any, name: str, total: int) -> DeviceProfile:
    """A card without a profile: what NVML tells of it, the rest as the anonymous device."""
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return dataclasses.replace(
        device(f"{total}"), id=name, name=name, compute_capability=capability,
        cublas_workspace_bytes=cublas_workspace_bytes("nvidia", capability), source="NVML; no profile of this card",
    )  # fmt: skip


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
