"""What the job may use of this machine's main memory: the smallest of the control group's limit, SLURM's and what is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from launchguard.units import MIB

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc/self/cgroup")


def host_memory(env: Mapping[str, str], cgroup: Path = CGROUP, own: Path = PROC) -> tuple[int, str]:
    """(bytes, who says so)."""
    import psutil  # only here: a check that names its device does not need it

    found = [(psutil.virtual_memory().total, "/proc/meminfo"), *_slurm(env), *_control_groups(cgroup, own)]
    return min(found)


def _slurm(env: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """sbatch --mem, or --mem-per-cpu times the CPUs of the node (sbatch's output environment variables, in MiB)."""
    whole, per_cpu, cpus = (env.get(name, "") for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"))
    if whole.isdigit() and int(whole):
        yield int(whole) * MIB, "SLURM_MEM_PER_NODE"
    elif per_cpu.isdigit() and cpus.isdigit() and int(per_cpu) and int(cpus):
        yield int(per_cpu) * int(cpus) * MIB, "SLURM_MEM_PER_CPU"


def _control_groups(root: Path, own: Path) -> Iterator[tuple[int, str]]:
    """Limits of this process's group and of those above it: memory.max (v2), memory/memory.limit_in_bytes (v1). Unlimited is "max", or a
    number beyond any machine, which the minimum ignores."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "1:memory:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        for folder in (base / path.lstrip("/"), *(base / path.lstrip("/")).parents):
            if folder != base and base not in folder.parents:
                break
            text = _read(folder / name)
            if text.isdigit():
                yield int(text), str(folder / name)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
