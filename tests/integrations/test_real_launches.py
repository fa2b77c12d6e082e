"""Real launchers, started through `launchguard run`, train one step of a tiny model on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-real-run"
BIN = Path(sys.executable).parent


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **more}
    arguments = [str(BIN / "launchguard"), "run", "--device", "24GiB", "--", *command]
    return subprocess.run(arguments, cwd=TINY, capture_output=True, text=True, env=env, timeout=900)


def test_accelerate_launch_trains_a_step() -> None:
    launcher = "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    done = run(*launcher.split(), "train_accelerate.py", "--model_name_or_path", "../models/tiny-llama")
    assert done.returncode == 0, done.stderr
    assert "rank 0: step done" in done.stdout
    assert "fits: the only rank" in done.stderr


def test_deepspeed_trains_a_step() -> None:
    """The first start on a machine compiles DeepSpeed's shared-memory collective (two minutes)."""
    launcher, script = "deepspeed --num_gpus 2 --master_port 29617", "train_deepspeed.py --deepspeed_config ds_tiny.json"
    done = run(*launcher.split(), *script.split(), "--model_name_or_path", "../models/tiny-llama", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0: step 1 done" in done.stdout and "rank 1: step 1 done" in done.stdout
    assert "fits: rank 0 of 2" in done.stderr
