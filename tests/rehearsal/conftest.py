"""The interpreter of an environment with a CUDA build of torch: $LAUNCHGUARD_VGPU_PYTHON, or .venv-vgpu (make vgpu). Without one the
tests that run real rehearsals are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
FIRST_RANK = ("--random-weights", "--ranks", "0")


@pytest.fixture(scope="session")
def vgpu_python() -> str:
    path = os.environ.get("LAUNCHGUARD_VGPU_PYTHON") or str(ROOT / ".venv-vgpu" / "bin" / "python")
    if not Path(path).exists():
        pytest.skip("no environment with a CUDA build of torch (make vgpu)")
    return path


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A scratch folder with a short path: sockets below it end at 108 characters."""
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        yield Path(folder)


@dataclass
class Rehearsed:
    code: int
    out: str
    err: str
    report: dict[str, Any]

    def phases(self, rank: int = 0) -> dict[str, Any]:
        return {p["name"]: p for p in self.report["ranks"][rank]["phases"]}

    def notes(self, code: str) -> list[dict[str, Any]]:
        return [note for note in self.report["notes"] if note["code"] == code]


@pytest.fixture
def rehearse(vgpu_python: str, tmp_path: Path, short_folder: Path) -> Callable[..., Rehearsed]:
    """rehearse(*options, "--", *command, command_name="rehearse", cwd=...) in a process of its own."""

    def call(*words: str, cwd: Path = SCRIPTS, verb: str = "rehearse", env: dict[str, str] | None = None) -> Rehearsed:
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "launchguard", verb, "--python", vgpu_python, "--json", str(report), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TMPDIR": str(short_folder), **(env or {})}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
        assert not list(short_folder.glob("launchguard-*")), "a rehearsal leaves nothing on disk"
        document = json.loads(report.read_text()) if report.exists() else {}
        return Rehearsed(done.returncode, done.stdout, done.stderr, document)

    return call


@pytest.fixture
def both(rehearse: Callable[..., Rehearsed]) -> Callable[..., tuple[Rehearsed, Rehearsed]]:
    """both(command, device=..., seq_len=..., options=...): (predicted, rehearsed with the options), where neither fails."""

    def call(command: Sequence[str], device: str, seq_len: int, options: Sequence[str]) -> tuple[Rehearsed, Rehearsed]:
        run = rehearse("--device", device, *options, "--", *command)
        assert run.code == 0, run.out + run.err
        check = rehearse("--device", device, "--seq-len", str(seq_len), "--", *command, verb="check")
        assert check.code == 0, check.out + check.err
        return check, run

    return call
