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


@pytest.mark.parametrize("adapters", ["false", "true"])
def test_dpo_through_evaluation_and_save(rehearse: Rehearse, adapters: str) -> None:
    """Two models in one loss; text pairs, a tokenizer (saved by Rust), evaluation, save."""
    done = rehearse("--device", "24GiB", "--through", "save", "--", "python", "dpo.py", "--output_dir", "out", "--bf16", "true",
                    "--per_device_train_batch_size", "2", "--lora", adapters)  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert {"prepare", "forward_1", "backward_2", "step_2", "eval", "save"} <= set(done.phases())
    states = done.report["ranks"][0]["breakdown"]["optimizer_states"]
    policy = 2 * 2 * 2_886_912  # two states of two bytes for every parameter of dpo.py's model
    assert policy <= states < 1.1 * policy if adapters == "false" else states < policy / 2, "AdamW of the policy alone, or of its adapters"


@pytest.mark.parametrize("command", [
    "python saves.py plain", "python saves.py trainer", "torchrun --nproc_per_node 2 saves.py distributed",
    "accelerate launch --config_file fsdp2.yaml saves.py accelerate", "deepspeed --num_gpus 2 saves.py deepspeed",
])  # fmt: skip
def test_what_was_saved_can_be_loaded_again(rehearse: Rehearse, command: str) -> None:
    whole = "saves.py distributed" in command or command.startswith("python")
    done = rehearse("--device", "24GiB", "--steps", "9", *(() if whole else ("--ranks", "0")), "--", *command.split())
    assert done.code == 0, done.out + done.err
    assert done.report["verdict"] == "fits" and "step_2" in done.phases() and not done.notes("LG126")


def test_a_rank_without_the_files_of_rank_0_is_not_known(rehearse: Rehearse) -> None:
    done = rehearse("--device", "24GiB", "--steps", "9", "--strict", "--", "deepspeed", "--num_gpus", "2", "saves.py", "deepspeed")
    assert done.code == 3, done.out + done.err
    assert "saves.py:99" in done.notes("LG127")[0]["origin"] and "zero/" in done.notes("LG127")[0]["message"]
    assert "step_2" in done.phases(), "rank 0 is known"


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


FAILING_MODEL = """
import time, torch
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(4, 4)
    def forward(self, x):
        {body}
def build(): return M()
"""


def _job_of_a_module(folder: Path, body: str) -> Path:
    """A job file that names a module of the user's own, whose forward does `body`."""
    folder.mkdir()
    (folder / "mine.py").write_text(FAILING_MODEL.format(body=body))
    (folder / "launchguard.yaml").write_text("model: {source: 'mine:build', loss: sum, inputs: {x: {shape: [batch, 4], dtype: float32}}}\n")
    (folder / "train.py").write_text("raise SystemExit('never run')")
    return folder


def test_a_stand_in_that_fails_is_said(rehearse: Rehearse, tmp_path: Path) -> None:
    work = _job_of_a_module(tmp_path / "work", "return self.l(x[:, :3])")
    done = rehearse("--device", "24GiB", "--engine", "rehearse", "--", "python", "train.py", cwd=work, verb="check")
    assert done.code == 4, done.out + done.err
    assert "running a stand-in" in done.err
    assert "error[LG105]: rank 0: the stand-in fails in forward_1: RuntimeError: mat1 and mat2" in done.out and "mine.py:8" in done.out


def test_the_stand_in_builds_every_optimizer_of_the_table(rehearse: Rehearse) -> None:
    done = rehearse("--device", "24GiB", "--steps", "1000", "--", "python", "optimizers.py", env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.out + done.err


def test_communication_hooks_of_ddp(rehearse: Rehearse) -> None:
    """torch's own, and the script's own: they run, with results in their futures, and hold what they hold."""
    peaks = {}
    for kind in ("none", "bf16", "powersgd", "own", "builtin"):
        done = rehearse("--device", "24GiB", "--ranks", "0", "--steps", "4", "--", "torchrun", "--nproc_per_node", "4", "ddp_hook.py", kind)
        assert done.code == 0, done.out + done.err
        peaks[kind] = done.phases()["backward_2"]["allocated_bytes"]
    bucket = 6 * 4 * (1024**2 + 1024)  # layers that fill 25 MiB
    assert all(peaks[kind] >= peaks["none"] + bucket // 2 for kind in ("bf16", "own", "builtin")) and peaks["powersgd"] > peaks["none"], (
        peaks
    )


def test_paged_states_are_not_on_the_card(rehearse: Rehearse) -> None:
    """bitsandbytes' managed memory: 8-bit states of the card without, a 256th of them (absmax) with paging."""
    states = {}
    for optim in ("adamw_8bit", "paged_adamw_8bit"):
        done = rehearse("--device", "24GiB", "--", "python", "trainer.py", "--output_dir", "out", "--optim", optim)
        assert done.code == 0, done.out + done.err
        before, after = (done.phases()[name]["allocated_bytes"] for name in ("forward_1", "forward_2"))
        states[optim] = after - before
    params = 2_887_936 - 2 * 1024 * 256  # of trainer.py's model, but for the embeddings, whose states the Trainer keeps in 32 bits
    assert states["adamw_8bit"] - states["paged_adamw_8bit"] >= 1.9 * params


@pytest.mark.parametrize("name, states", [("sgd", 0), ("adagrad", 1)])
def test_a_set_optimizer_is_what_the_stand_in_of_a_trainer_job_builds(rehearse: Rehearse, name: str, states: int) -> None:
    done = rehearse("--device", "24GiB", "--engine", "rehearse", "--set", f"optimizer.name={name}", "--", "python", "train.py",
                    "--output_dir", "out", "--max_length", "64", verb="check")  # fmt: skip
    assert done.code == 0, done.out + done.err
    held = done.report["ranks"][0]["breakdown"]
    assert abs(held["optimizer_states"] - states * held["parameters"]) < 0.01 * held["parameters"]


def test_dpo_by_the_stand_in(rehearse: Rehearse, tmp_path: Path) -> None:
    """The stand-in holds the policy and its reference model, and so does the prediction, which says what it leaves out (LG341)."""
    work = tmp_path / "work"
    shutil.copytree(SCRIPTS, work)
    (work / "train.py").write_text(
        (work / "train.py").read_text().replace("TrainingArguments", "DPOConfig").replace("Trainer(", "DPOTrainer(")
    )
    options = (
        "--device",
        "24GiB",
        "--seq-len",
        "128",
        "--",
        "python",
        "train.py",
        "--output_dir",
        "out",
        "--per_device_train_batch_size",
        "2",
    )
    run = rehearse("--engine", "rehearse", *options, cwd=work, verb="check")
    assert run.code == 0 and run.report["job"]["loop"]["value"] == "dpo", run.out + run.err
    check = rehearse(*options, cwd=work, verb="check")
    policy = 2 * 15_995_392  # parameters of tiny-llama in bfloat16
    for engine in (run, check):
        assert 2 * policy <= engine.phases()["prepare"]["allocated_bytes"] < 2.1 * policy
    assert check.notes("LG341")


def _command(verb: str, vgpu_python: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "launchguard", verb, "--python", vgpu_python, "--device", "24GiB", *words]


@pytest.mark.parametrize("verb", ["rehearse", "check"])
def test_interrupted_it_leaves_nothing(verb: str, vgpu_python: str, short_folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(short_folder)}
    if verb == "rehearse":
        work, command = SCRIPTS, _command(verb, vgpu_python, "--", "python", "faults.py", "idle")
    else:
        work = _job_of_a_module(tmp_path / "work", "time.sleep(600)")
        command = _command(verb, vgpu_python, "--engine", "rehearse", "--", "python", "train.py")
    process = subprocess.Popen(command, cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    children: list[psutil.Process] = []  # the rank begins a moment after its order is written
    while not (list(short_folder.glob("*/r0/order.json")) and children) and time.monotonic() < deadline:
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
