"""What runs beside the user's script, without a card: weights, the peak's explanation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from launchguard.rehearsal.inside.breakdown import _live_at_peak
from launchguard.rehearsal.inside.weights import write_sparse
from launchguard.rehearsal.record import read_record


def test_a_sparse_checkpoint_is_a_checkpoint_that_takes_no_disk(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_sparse(path, {"a": (torch.bfloat16, [1 << 20, 4]), "b": (torch.float32, [3])})
    assert path.stat().st_size > 8 << 20 and path.stat().st_blocks * 512 < 1 << 20
    with safe_open(path, "pt") as file:
        assert file.get_tensor("a").shape == (1 << 20, 4) and file.get_tensor("a").dtype == torch.bfloat16
        assert not file.get_tensor("b").any()


def test_live_at_peak_counts_as_the_allocator_does() -> None:
    history = [
        {"action": "segment_alloc", "addr": 1, "size": 2 << 20, "time_us": 1},
        {"action": "alloc", "addr": 0x1000, "size": 1000, "time_us": 2},
        {"action": "alloc", "addr": 0x2000, "size": 512, "time_us": 3},
        {"action": "free_requested", "addr": 0x1000, "size": 1000, "time_us": 4},
        {"action": "free_completed", "addr": 0x1000, "size": 1000, "time_us": 5},
        {"action": "alloc", "addr": 0x1000, "size": 512, "time_us": 6},
    ]
    assert [(b["address"], b["bytes"], b["freed"]) for b in _live_at_peak(history)] == [(0x1000, 1024, 5), (0x2000, 512, None)]


def test_a_record_becomes_a_timeline() -> None:
    peaks = {"allocated": 5, "reserved": 7, "end_allocated": 1, "end_reserved": 7, "calls": 1}
    document = {
        "result": "oom", "phases": {"load": peaks}, "max_allocated": 5, "max_reserved": 7, "device_peak": 9, "peak_phase": "load",
        "failed_in": None, "alloc_retries": 1, "optimizer_steps": 0, "value_reads": {}, "awaited": 0, "without_cudnn": [],
        "versions": {}, "seconds": 1.0, "host_peak": 0, "exit_code": 1,
        "error": {"type": "OutOfMemoryError", "message": "out of memory", "where": "t.py:3", "line": "x", "traceback": ""},
        "ooms": [{"phase": "load", "module": "", "requested_bytes": 4, "allocated_bytes": 5, "reserved_bytes": 7}],
        "live_at_peak": [{"category": "parameters", "label": "made in load", "bytes": 5}],
    }  # fmt: skip
    timeline = read_record(3, document).timeline()
    assert timeline.oom is not None and timeline.oom.requested_bytes == 4
    assert sum(timeline.live.values()) == timeline.allocated_bytes == 5 and timeline.phases[0].name == "load"


def test_large_host_tensors_cost_no_pages(tmp_path: Path) -> None:
    """Casts, clones and zeros of large floats touch nothing; small ones, integers and gradients are as ever."""
    done = subprocess.run([sys.executable, "-c", f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import torch
from launchguard.rehearsal.inside import host_pages
host_pages.install()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
big = torch.empty(1 << 28, dtype=torch.bfloat16)
wide = big.float().clone(); wide.copy_(big); wide.zero_()
assert wide.dtype == torch.float32 and wide.shape == big.shape
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"
assert not wide[:1000].any() and not wide[-1000:].any()
small = torch.arange(10.0, requires_grad=True)
assert small.double().clone().tolist() == list(range(10)) and torch.arange(1 << 20).clone()[-1] == (1 << 20) - 1
small.clone().sum().backward(); assert small.grad.tolist() == [1.0] * 10 and small.grad.zero_().sum() == 0
"""], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
