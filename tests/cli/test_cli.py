"""The command line as a user meets it: exit codes, what is on which stream, and what never happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from launchguard.report.json import SCHEMA_FILE

PROGRAM = [sys.executable, "-m", "launchguard"]
ModelDir = Callable[..., Path]


def launchguard(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}, timeout=300)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


@pytest.fixture
def job(tmp_path: Path, model_dir: ModelDir) -> list[str]:
    """A small Trainer job on one process; its command."""
    model_dir()
    (tmp_path / "train.py").write_text("from transformers import Trainer, TrainingArguments\nraise SystemExit('the script was run')\n")
    return [sys.executable, "train.py", "--model_name_or_path", "./model", "--per_device_train_batch_size", "2", "--max_length", "64"]


def test_a_job_that_fits_exits_0_and_says_so_on_stdout(job: list[str], tmp_path: Path) -> None:
    done = launchguard("check", "--device", "24GiB", "--", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits: the only rank needs")
    assert "effective configuration" in done.stdout
    assert done.stderr == ""


def test_a_job_that_does_not_fit_exits_1_with_causes_and_help(tmp_path: Path, model_dir: ModelDir) -> None:
    model_dir(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_hidden_layers=6, vocab_size=32000)
    (tmp_path / "train.py").write_text("from transformers import Trainer\n")
    command = ["python", "train.py", "--model_name_or_path", "./model", "--per_device_train_batch_size", "8", "--max_length", "256"]
    done = launchguard("check", "--device", "4GiB", "--json", "report.json", "--", *command, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("error[LG101]: the only rank needs")
    assert "because" in done.stdout
    assert "help: " in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    assert report["verdict"] == "exceeds"
    assert report["advice"] and all(a["device_bytes"] < report["ranks"][0]["peak"]["device_bytes"] for a in report["advice"])


def test_json_on_stdout_is_json_alone(job: list[str], tmp_path: Path) -> None:
    done = launchguard("check", "--device", "24GiB", "--json", "-", "--", *job, cwd=tmp_path)
    report = json.loads(done.stdout)
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    rank = report["ranks"][0]
    assert sum(rank["breakdown"].values()) == rank["peak"]["device_bytes"]
    assert report["job"]["micro_batch_size"] == {"value": 2, "origin": "command line:--per_device_train_batch_size"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--", "mpirun", "train.py"], "mpirun"),
        (["--device", "h100-900", "--", "python", "train.py", "--model_name_or_path", "./model"], "h100-900"),
        (["--device", "24GiB", "--", "python", "train.py"], "names no model"),
        (["--device", "24GiB", "--", "python", "train.py", "--model_name_or_path", "./absent"], "absent"),
        (
            ["--device", "24GiB", "--model", "./model", "--", "deepspeed", "--num_gpus", "8", "train.py", "--deepspeed", "absent.json"],
            "absent.json",
        ),
        (["--device", "24GiB", "--headroom", "much", "--model", "./model", "--", "python", "train.py"], "much"),
        (["--device", "24GiB", "--set", "zero", "--model", "./model", "--", "python", "train.py"], "--set"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_2(arguments: list[str], expected: str, job: list[str], tmp_path: Path) -> None:
    done = launchguard("check", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert done.stdout == ""


def test_malformed_json_names_file_and_line(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n "bf16": {"enabled": true},\n "zero_optimization": {"stage": 3,}\n}\n')
    done = launchguard("check", "--device", "24GiB", "--", "deepspeed", "--num_gpus", "2", *job[1:], "--deepspeed", "ds.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "ds.json" in done.stderr and "3" in done.stderr
    assert done.stdout == ""


def test_options_have_environment_twins(job: list[str], tmp_path: Path) -> None:
    done = launchguard("check", "--", *job, cwd=tmp_path, env={"LAUNCHGUARD_DEVICE": "24GiB"})
    assert done.returncode == 0, done.stderr


def test_a_model_that_cannot_be_traced_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n def __init__(self):\n  super().__init__(); self.l = torch.nn.Linear(4, 4)\n"
        " def forward(self, x):\n  raise ValueError('not today')\ndef build(): return M()\n"
    )
    (tmp_path / "launchguard.yaml").write_text(
        "device: 24GiB\nmodel: {source: 'mine:build', inputs: {x: {shape: [batch, 4], dtype: float32}}}\n"
    )
    (tmp_path / "train.py").write_text("")
    done = launchguard("check", "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0
    assert "cannot tell" in done.stdout and "not today" in done.stdout and "mine.py" in done.stdout
    strict = launchguard("check", "--strict", "--", "python", "train.py", cwd=tmp_path)
    assert strict.returncode == 3
    assert launchguard("run", "--strict", "--", "python", "train.py", cwd=tmp_path).returncode == 125


# ---------------------------------------------------------------- run
def test_run_becomes_the_child(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, os\nprint('in', sys.stdin.read().strip(), os.environ['MARK'], os.getpid())\nsys.exit(7)\n"
    )
    process = subprocess.Popen(
        [*PROGRAM, "run", "--device", "24GiB", "--model", "./model", "--seq-len", "64", "--", sys.executable, "train.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "MARK": "kept"},
    )  # fmt: skip
    out, err = process.communicate("words\n", timeout=300)
    assert process.returncode == 7, err
    assert out == f"in words kept {process.pid}\n"  # the same process, its stdin and environment, nothing of ours on stdout
    assert "fits" in err


def test_run_refuses_with_78_and_launches_nothing(job: list[str], tmp_path: Path) -> None:
    done = launchguard("run", "--device", "1GiB", "--headroom", "70%", "--", *job, cwd=tmp_path)
    assert done.returncode == 78, done.stderr
    assert done.stdout == "" and "LG101" in done.stderr and "the script was run" not in done.stderr
    warned = launchguard("run", "--device", "1GiB", "--headroom", "70%", "--on-exceed", "warn", "--", *job, cwd=tmp_path)
    assert warned.returncode == 1 and "the script was run" in warned.stderr


def test_run_launches_what_it_cannot_tell(tmp_path: Path) -> None:
    """No model is named: the job is none the worse for it."""
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = launchguard("run", "--device", "24GiB", "--", sys.executable, "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "cannot tell" in done.stderr
    assert launchguard("run", "--strict", "--device", "24GiB", "--", sys.executable, "train.py", cwd=tmp_path).returncode == 125


def test_a_fault_of_launchguard_does_not_stop_a_job(job: list[str], tmp_path: Path) -> None:
    """With its engine broken (here: made impossible to import) `run` warns and launches, and with --strict ends with 125."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import sys\nsys.modules['launchguard.preflight'] = None\n")
    (tmp_path / "train.py").write_text("print('ran')\n")
    env = {"PYTHONPATH": str(broken)}
    done = launchguard("run", "--device", "24GiB", "--", *job, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "launchguard failed" in done.stderr and "launched" in done.stderr
    assert launchguard("run", "--strict", "--device", "24GiB", "--", *job, cwd=tmp_path, env=env).returncode == 125


def test_run_refuses_a_job_whose_own_file_is_broken(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{")
    command = ["deepspeed", "--num_gpus", "2", *job[1:], "--deepspeed", "ds.json"]
    done = launchguard("run", "--device", "24GiB", "--", *command, cwd=tmp_path)
    assert done.returncode == 2 and "ds.json" in done.stderr and done.stdout == ""


def test_signals_reach_the_child(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    command = [*PROGRAM, "run", "--device", "24GiB", "--model", "./model", "--seq-len", "64", "--quiet", "--", sys.executable, "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    assert time.monotonic() - started < 10


def test_a_command_that_is_not_there_exits_127(tmp_path: Path, model_dir: ModelDir) -> None:
    model_dir()
    (tmp_path / "train.py").write_text("")
    done = launchguard("run", "--device", "24GiB", "--model", "./model", "--", "./no/such/python3", "train.py", cwd=tmp_path)
    assert done.returncode == 127 and "no/such/python3" in done.stderr


def test_devices_and_doctor(tmp_path: Path) -> None:
    listed = launchguard("devices", cwd=tmp_path)
    assert listed.returncode == 0 and "h100-80-sxm" in listed.stdout
    examined = launchguard("doctor", cwd=tmp_path)
    assert examined.returncode == 0 and "torch" in examined.stdout and "can predict" in examined.stdout


def test_explain(tmp_path: Path) -> None:
    assert "  LG248  nothing to shard" in launchguard("explain", cwd=tmp_path).stdout
    assert launchguard("explain", "LG248", cwd=tmp_path).stdout.startswith("# LG248: nothing to shard")
    unknown = launchguard("explain", "LG999", cwd=tmp_path)
    assert unknown.returncode == 2 and "no code LG999" in unknown.stderr


def test_lengths_of_the_samples_give_percentiles_and_the_worst_batch(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("length,count\n8,90\n32,9\n400,1\n")
    done = launchguard("check", "--device", "24GiB", "--lengths", "lengths.csv", "--json", "report.json", "--", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    found = {entry["label"]: entry for entry in report["lengths"]}
    assert [found[label]["tokens"] for label in ("p50", "p90", "p99", "max")] == [8, 32, 64, 64]  # cut at --max_length
    assert found["p50"]["device_bytes"] < found["max"]["device_bytes"]
    note = next(note for note in report["notes"] if note["code"] == "LG271")
    assert "any batch of 2" in note["message"] and "max 64 tokens" in note["message"]
    bad = launchguard("check", "--device", "24GiB", "--lengths", "none.json", "--", *job, cwd=tmp_path)
    assert bad.returncode == 2 and "none.json does not exist" in bad.stderr
