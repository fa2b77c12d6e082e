"""Real rehearsals: the CUDA build of torch and the real libraries on virtual cards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, SCRIPTS, Rehearsed

Rehearse = Callable[..., Rehearsed]


def test_a_plain_script_fits_and_leaves_nothing_behind(rehearse: Rehearse, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(SCRIPTS, work)
    (work / "precious.txt").write_text("mine")
    done = rehearse("--device", "a100-80-sxm", "--through", "save", "--", "python", "tiny.py", "3", cwd=work)
    assert done.code == 0, done.out + done.err
    assert "running the script" in done.err
    assert done.report["verdict"] == "fits"
    assert (work / "precious.txt").read_text() == "mine" and not (work / "out").exists()
    assert any("precious.txt" in note["message"] for note in done.notes("LG124"))
    peak = done.report["ranks"][0]
    assert sum(peak["breakdown"].values()) == peak["peak"]["device_bytes"]
    # the parameters are counted as torch counts them: 124M of GPT-2 less ten layers, tied embeddings once, plus masks as buffers
    assert abs(peak["breakdown"]["parameters"] - 4 * 53_559_552) < 1 << 16


def test_it_stops_after_the_steps(rehearse: Rehearse) -> None:
    done = rehearse("--device", "a100-80-sxm", "--steps", "1", "--", "python", "tiny.py", "1000000")
    assert done.code == 0
    assert "step_1" in done.phases() and "step_2" not in done.phases()


def test_a_card_that_is_too_small(rehearse: Rehearse) -> None:
    done = rehearse("--device", "1.2GiB", "--", "python", "tiny.py")
    assert done.code == 1
    assert "error[LG101]" in done.out and "tried to allocate" in done.out
    assert done.notes("LG122"), "it says what would hold it"
    assert done.report["ranks"][0]["peak"]["device_bytes"] > 1.2 * 2**30, "what it needs, not where it died"


@pytest.mark.parametrize("launcher", [("torchrun", "--nproc_per_node", "2"), ("accelerate", "launch", "--config_file", "fsdp2.yaml")])
def test_trainer_through_evaluation_and_save(rehearse: Rehearse, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    work = tmp_path / "work"
    shutil.copytree(SCRIPTS, work)
    done = rehearse("--device", "a100-80-sxm", "--through", "save", "--", *launcher, "trainer.py", "--output_dir", "out", "--bf16",
                    "--per_device_train_batch_size", "2", "--max_steps", "1000", cwd=work)  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert {"prepare", "forward_1", "backward_2", "step_2", "eval", "save"} <= set(done.phases())
    assert [rank["ranks"] for rank in done.report["ranks"]] == [[0], [1]]
    assert not (work / "out").exists()


def test_deepspeed_zero3_agrees_with_the_trace_engine(rehearse: Rehearse) -> None:
    """The same job through both engines: equal allocated peaks."""
    command = ["deepspeed", "--num_gpus", "2", "train.py", "--deepspeed", "zero3.json", "--model_name_or_path", "tiny-llama", "--bf16",
               "--per_device_train_batch_size", "2", "--block_size", "128", "--output_dir", "out"]  # fmt: skip
    run = rehearse("--device", "a100-80-sxm", "--engine", "rehearse", "--", *command, verb="check")
    assert run.code == 0, run.out + run.err
    check = rehearse("--device", "a100-80-sxm", "--", *command, verb="check")
    for name in ("prepare", "forward_1", "backward_1", "step_1", "forward_2", "backward_2", "step_2"):
        ours, real = check.phases()[name]["allocated_bytes"], run.phases()[name]["allocated_bytes"]
        assert abs(ours - real) <= max(0.001 * real, 4096), (name, ours, real)


@pytest.mark.parametrize("kind, says", [("path", "FileNotFoundError"), ("shape", "mat1 and mat2"), ("killed", "signal 9")])
def test_another_end_is_named(rehearse: Rehearse, kind: str, says: str) -> None:
    done = rehearse("--device", "24GiB", "--", "python", "faults.py", kind)
    assert done.code == 4
    assert "error[LG105]" in done.out and says in done.out and "Traceback" not in done.err


def test_a_script_that_never_steps_ends_on_time_with_its_children(rehearse: Rehearse) -> None:
    started = time.monotonic()
    done = rehearse("--device", "24GiB", "--time-limit", "20", "--", "python", "faults.py", "idle")
    assert done.code == 4 and "time limit" in done.out and time.monotonic() - started < 60
    assert not [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(600)" in " ".join(p.info["cmdline"] or ())]


@pytest.mark.parametrize("kind", ["nvml", "smi", "workers", "spawn"])
def test_what_scripts_also_do(rehearse: Rehearse, kind: str) -> None:
    done = rehearse("--device", "24GiB", "--", "python", "faults.py", kind)
    assert done.code == 0, done.out + done.err


def test_a_branch_on_a_value_is_said(rehearse: Rehearse) -> None:
    done = rehearse("--device", "24GiB", "--", "python", "faults.py", "branch")
    assert done.code == 0
    assert "faults.py" in done.notes("LG130")[0]["message"]
    assert done.report["confidence"]["level"] == "medium"


def test_layers_of_cudnn_run_and_are_said(rehearse: Rehearse) -> None:
    done = rehearse("--device", "24GiB", "--", "python", "faults.py", "recurrent")
    assert done.code == 0, done.out + done.err
    assert "convolutions and recurrent layers" in done.notes("LG131")[0]["message"]


def test_interrupted_it_leaves_nothing(vgpu_python: str, short_folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(short_folder)}
    command = [
        sys.executable,
        "-m",
        "launchguard",
        "rehearse",
        "--python",
        vgpu_python,
        "--device",
        "24GiB",
        "--",
        "python",
        "faults.py",
        "idle",
    ]
    process = subprocess.Popen(command, cwd=SCRIPTS, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(short_folder.glob("*/r0/order.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert children and not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not list(short_folder.iterdir())


def test_quantised_weights_need_not_exist(rehearse: Rehearse) -> None:
    """from_pretrained with a BitsAndBytesConfig on a folder that holds a config alone."""
    done = rehearse("--device", "24GiB", "--random-weights", "--", "python", "qlora.py", "tiny-llama")
    assert done.code == 0, done.out + done.err
    assert "step_2" in done.phases()
