"""Device memory that the communication library takes beside torch's allocator."""

from __future__ import annotations

from typing import Any, NamedTuple

from launchguard.profiles.device_profile import DeviceProfile
from launchguard.profiles.reading import read_profile

_MB = 10**6


class CommunicatorBytes(NamedTuple):
    """Bytes of one communicator on one rank, the interval it was seen in, and who says so."""

    nbytes: int
    low: int
    high: int
    source: str


def communicator_bytes(world_size: int, gpus_per_node: int, device: DeviceProfile) -> CommunicatorBytes:
    """Bytes of one communicator of `world_size` ranks, `gpus_per_node` of them in a node; each further process group that
    really communicates takes as much again. Zero for a group of one."""
    if world_size <= 1:
        return CommunicatorBytes(0, 0, 0, "a group of one rank does not communicate")
    data = read_profile("communication.yaml")
    local = max(1, min(world_size, gpus_per_node))
    links = data["one_node"][device.interconnect]
    figures, sources = [links["pair" if local <= 2 else "group"]], [links["source"]]
    if world_size > gpus_per_node:
        figures.append(data["across_nodes"])
        sources.append(data["across_nodes"]["source"])
    nbytes, low, high = (sum(f[key] for f in figures) * _MB for key in ("expected_mb", "low_mb", "high_mb"))
    nvls = _nvls_bytes(data["nvls"], local, device)
    if nvls:
        sources.append(data["nvls"]["source"])
    return CommunicatorBytes(nbytes + nvls, low, high + nvls, "; ".join(sources))


def _nvls_bytes(rule: dict[str, Any], local_ranks: int, device: DeviceProfile) -> int:
    capability = device.compute_capability
    if local_ranks <= 2 or device.interconnect != "nvlink" or capability is None or capability < tuple(rule["minimum_capability"]):
        return 0
    channels = rule["channels"].get(capability[0], max(rule["channels"].values()))
    return int(local_ranks * channels * rule["bytes_per_rank_and_channel"])
