"""Traces on disk: zlib-packed JSON (never pickle), one file a key, written atomically. Reading one needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from launchguard.events import ModuleInfo, ParamInfo, Prediction, StepTrace, TraceEvent, TraceOp

MAX_FILES = 200


def cache_dir() -> Path:
    """$LAUNCHGUARD_CACHE_DIR, else $XDG_CACHE_HOME/launchguard, else ~/.cache/launchguard."""
    own = os.environ.get("LAUNCHGUARD_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launchguard"


def encode(trace: StepTrace) -> bytes:
    flat: list[int] = []
    for op, a, b in trace.events:
        flat += (int(op), a, b)
    document = {
        "params": [dataclasses.astuple(p) for p in trace.params],
        "modules": [dataclasses.astuple(m) for m in trace.modules],
        "buffer_bytes": trace.buffer_bytes,
        "events": flat,
        "facts": dict(trace.facts),
        "inputs": trace.inputs,
        "outputs": trace.outputs,
        "predictions": trace.predictions,
    }
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)


def decode(data: bytes) -> StepTrace:
    """Raises ValueError or KeyError for anything that `encode` did not write."""
    document: dict[str, Any] = json.loads(zlib.decompress(data))
    ops = [TraceOp(i) for i in range(len(TraceOp))]
    numbers = document["events"]
    events = tuple(TraceEvent(ops[op], a, b) for op, a, b in zip(numbers[::3], numbers[1::3], numbers[2::3]))
    params = tuple(ParamInfo(n, tuple(shape), dtype, grad, module, tuple(owners), stored)
                   for n, shape, dtype, grad, module, owners, stored in document["params"])  # fmt: skip
    modules = tuple(ModuleInfo(*m) for m in document["modules"])
    predictions = tuple(Prediction(*p) for p in document["predictions"])
    ends = tuple(document["inputs"]), tuple((s, n) for s, n in document["outputs"]), predictions
    return StepTrace(params, modules, tuple(document["buffer_bytes"]), events, document["facts"], *ends)


def load(key: str) -> StepTrace | None:
    """The cached trace; None when there is none, or when the file is damaged."""
    path = cache_dir() / f"{key}.trace"
    try:
        trace = decode(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, IndexError, zlib.error):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return trace


def store(key: str, data: bytes) -> None:
    """Best effort: a full or read-only disk costs the next run a trace, nothing else."""
    with contextlib.suppress(OSError):
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        os.replace(name, folder / f"{key}.trace")
        for old in sorted(folder.glob("*.trace"), key=lambda p: p.stat().st_mtime)[:-MAX_FILES]:
            old.unlink()
