"""How many GPUs a launcher would find on this node, without CUDA: NVML, narrowed by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launchguard.errors import InputError, NotTold
from launchguard.job import Note, Origin


def nvml_gpus() -> int:
    """GPUs that NVML sees; 0 when there is no driver or no pynvml."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no library, no permission: all mean that nothing can be seen from here
        return 0


def visible_devices(env: Mapping[str, str]) -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES up to the first invalid one, as the CUDA runtime reads them; None when it is not set."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = []
    for entry in text.split(","):
        if not entry.strip() or entry.strip() == "-1":
            break
        entries.append(entry.strip())
    return entries


def count_gpus(env: Mapping[str, str], gpus_per_node: int | None = None) -> tuple[int, Origin]:
    """(GPUs a process on this node would see, why); 0 when none can be seen from here."""
    visible = visible_devices(env)
    if gpus_per_node is not None:
        if visible and len(visible) < gpus_per_node:  # an empty variable hides the GPUs of this machine, not of the job's
            return len(visible), Origin("environment", "CUDA_VISIBLE_DEVICES")
        return gpus_per_node, Origin("command line", "--gpus-per-node")
    if visible is not None:
        return len(visible), Origin("environment", "CUDA_VISIBLE_DEVICES")
    return nvml_gpus(), Origin("this machine", "GPUs seen by NVML")


def local_gpus(env: Mapping[str, str], gpus_per_node: int | None, *, flag: str) -> tuple[int, Origin]:
    """As count_gpus, but none is an error. flag: the launcher's own way to state the number."""
    gpus, origin = count_gpus(env, gpus_per_node)
    if gpus < 1:
        fact = "CUDA_VISIBLE_DEVICES hides every GPU" if origin.source == "environment" else "no GPU can be seen on this machine"
        raise NotTold(f"the number of processes is not stated, and {fact}", where="launch command",
                         help=f"state it: {flag}, or launchguard's --gpus-per-node N for the machine it will run on")  # fmt: skip
    return gpus, origin


def device_notes(nproc: int, devices: Sequence[str] | None, gpus: int | None, origin: Origin) -> tuple[Note, ...]:
    """What the choice of GPUs means for ranks. devices: ids that the ranks may use, None for all; gpus: of the node, None when not known;
    origin: of `devices`. Raises InputError when a rank would have no GPU (torch: "CUDA error: invalid device ordinal")."""
    offered = min((n for n in (gpus, None if devices is None else len(devices)) if n is not None), default=nproc)
    if nproc > offered:
        what = f"the node gives {offered}" if offered == gpus else f"{origin} leaves {offered}"
        raise InputError(f"{nproc} processes per node, but {what} GPUs: the others would find no device", where=str(origin),
                         help=f"start {offered} processes per node, or give the job {nproc} GPUs", code="LG249")  # fmt: skip
    if devices is None or [*devices[:nproc]] == [str(i) for i in range(nproc)]:
        return ()
    pairs = ", ".join(f"{i} is {device}" for i, device in enumerate(devices[:nproc]))
    message = f"ranks number the GPUs they see from 0, in their messages too: GPU {pairs} of the node"
    return (Note("LG240", "info", message, str(origin)),)
