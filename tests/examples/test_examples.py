"""Every example gives a verdict for every rank, in the form of the schema; those that are refused come with advice that fits."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launchguard.report.json import SCHEMA_FILE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {
    "llama13b-zero3": ("fits", 8),
    "llama31-8b-accelerate-fsdp2": ("fits", 8),
    "llama31-8b-deepspeed-auto": ("exceeds", 8),
    "llama7b-lora-24gb": ("fits", 1),
    "custom-module-fsdp2": ("exceeds", 8),
}
BIN = str(Path(sys.executable).parent)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def check(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = shlex.split((folder / "command.txt").read_text())
    arguments = [sys.executable, "-m", "launchguard", "check", "--json", "-", *options, "--", *command]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    return done.returncode, report


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    verdict, world = EXPECTED[name]
    code, report = check(EXAMPLES / name)
    assert report["verdict"] == verdict and code == int(verdict == "exceeds")
    assert sorted(r for rank in report["ranks"] for r in rank["ranks"]) == list(range(world))
    for rank in report["ranks"]:
        assert sum(rank["breakdown"].values()) == rank["peak"]["device_bytes"]
    if verdict == "exceeds":
        assert any(a["fits"] for a in report["advice"])


def test_every_example_is_listed_here() -> None:
    assert {p.parent.name for p in EXAMPLES.glob("*/command.txt")} == set(EXPECTED)


def test_the_13b_job_shards_what_zero_3_shards() -> None:
    """13,015,864,320 parameters over 8 ranks: 2 bytes of parameters, 4 of master, 8 of Adam, 2 of averaged gradients each."""
    _, report = check(EXAMPLES / "llama13b-zero3")
    breakdown, share = report["ranks"][0]["breakdown"], 13_015_864_320 / 8
    assert breakdown["optimizer_states"] == pytest.approx(12 * share, rel=0.01)
    assert report["job"]["zero.stage"]["value"] == 3
    assert report["job"]["activation_checkpointing.enabled"]["value"] is True


def slurm(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The batch script with an `accelerate` that only says it was started."""
    stub = tmp_path / "accelerate"
    stub.write_text('#!/bin/sh\necho launched "$@"\n')
    stub.chmod(0o755)
    env = environment(**more)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    return subprocess.run(["bash", "job.sbatch"], cwd=EXAMPLES / "slurm", capture_output=True, text=True, env=env, timeout=600)


def test_the_slurm_script_launches_what_fits(tmp_path: Path) -> None:
    done = slurm(tmp_path, LAUNCHGUARD_DEVICE="h100-80-sxm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("launched launch --config_file")


def test_the_slurm_script_ends_with_78_on_a_card_that_is_too_small(tmp_path: Path) -> None:
    done = slurm(tmp_path, LAUNCHGUARD_DEVICE="t4")
    assert done.returncode == 78 and "launched" not in done.stdout
    assert "LG101" in done.stderr
