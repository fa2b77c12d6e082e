"""Tables that are not about a job: the known devices, and what this machine lets launchguard do."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator
from io import StringIO

import psutil
from rich.console import Console
from rich.table import Table

from launchguard import __version__
from launchguard.errors import LaunchguardError
from launchguard.installed import version_of
from launchguard.profiles import DeviceProfile, detect
from launchguard.rehearsal.build import find_compiler
from launchguard.rehearsal.target import find_target
from launchguard.report.wording import gib

LIBRARIES = {
    "torch": "trace models (any build, no GPU needed)",
    "transformers": "build Hugging Face models and read TrainingArguments",
    "accelerate": "read accelerate launch and its YAML",
    "deepspeed": "read deepspeed launches, validate DeepSpeed JSON",
    "peft": "LoRA",
    "trl": "SFT and DPO script arguments",
}


def device_table(profiles: Iterable[DeviceProfile], width: int) -> str:
    """One line a device: what --device takes, its name, total and context bytes in GiB, compute capability."""
    table = Table("device", "name", "usable", "context", "compute", box=None, pad_edge=False)
    for column in table.columns[2:4]:
        column.justify = "right"
    for p in profiles:
        capability = ".".join(map(str, p.compute_capability)) if p.compute_capability else "-"
        table.add_row(p.id, p.name, gib(p.total_bytes, 2), gib(p.context_bytes, 2), capability)
    return _text(table, width)


def doctor_report(width: int) -> str:
    """Versions, devices, memory and abilities, as a table."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for left, right in _findings():
        table.add_row(left, right)
    return _text(table, width)


def _findings() -> Iterator[tuple[str, str]]:
    yield "launchguard", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name, purpose in LIBRARIES.items():
        yield name, version_of(name) or f"not installed; needed to {purpose}: pip install {name}"
    yield from _devices()
    memory = psutil.virtual_memory()
    yield "host memory", f"{gib(memory.available)} available of {gib(memory.total)}"
    yield "rehearsal", _rehearsal()
    yield (
        "can predict",
        "single device, DDP, FSDP1, FSDP2, ZeRO 0-3, LoRA; forward, backward, steps, evaluation, save, resume; main memory of a node",
    )
    yield "cannot predict yet", "tensor, pipeline, context and expert parallelism; torch.compile's savings"


def _rehearsal() -> str:
    """Whether a rehearsal can run with this interpreter, and what is missing."""
    try:
        target = find_target(sys.executable)
        return f"possible: torch {target.torch_version} (CUDA {target.cuda_version}), compiler {' '.join(find_compiler())}"
    except LaunchguardError as e:
        return f"not with this Python: {e.message}; {e.help}"


def _devices() -> Iterator[tuple[str, str]]:
    try:
        found = detect()
    except LaunchguardError as e:
        yield "devices", e.message
        return
    if not found:
        yield "devices", "none visible here: give --device"
    for d in found:
        yield f"device {d.index}", f"{d.profile.name}, {gib(d.free_bytes)} free of {gib(d.profile.total_bytes)}"


def _text(table: Table, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
