"""Each rank gets the environment that its launcher would have given it: held against the launchers themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launchguard import launch
from launchguard.errors import InputError, NotTold
from launchguard.profiles import device
from launchguard.rehearsal.card_environment import card_environment, contained, rank_environment, script_arguments
from launchguard.rehearsal.run import distinct_ranks

# what a launcher sets from its own process: ports, run ids, paths of its error files
OF_THE_PROCESS = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
                  "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PET_", "KINETO_"}  # fmt: skip
PRINT = "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], open(os.environ['OUT'] + os.environ['RANK'], 'w'))"


def _real(tmp_path: Path, *command: str) -> list[tuple[dict[str, str], list[str]]]:
    (tmp_path / "show.py").write_text(PRINT)
    env = {**os.environ, "OUT": str(tmp_path / "rank"), "DS_ACCELERATOR": "cpu"}
    subprocess.run([*command, "show.py", "--x", "1"], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=120)
    ranks = [json.loads((tmp_path / f"rank{r}").read_text()) for r in range(2)]
    return [({k: v for k, v in e.items() if os.environ.get(k) != v and k != "OUT"}, argv) for e, argv in ranks]


def _compared(tmp_path: Path, command: list[str]) -> None:
    spec = launch.parse([*command, "show.py", "--x", "1"], {"PATH": os.environ["PATH"]}, str(tmp_path), gpus_per_node=2)
    program = (
        [sys.executable, "-m", "torch.distributed.run"] if command[0] == "torchrun" else [str(Path(sys.executable).parent / command[0])]
    )
    for rank, (real, argv) in enumerate(_real(tmp_path, *program, *command[1:])):
        ours = rank_environment(spec, rank)
        ignored = {k for k in real if k in OF_THE_PROCESS or k.startswith(("PET_", "TORCH_", "PYTHON", "LC_", "LD_", "DS_"))}
        expected = {k: v for k, v in real.items() if k not in ignored and k in ours | {"RANK": "", "LOCAL_RANK": ""}}
        assert {k: ours[k] for k in expected} == expected
        missing = {k for k in real if k not in ours and k not in ignored and k.isupper() and ("RANK" in k or "SIZE" in k)}
        assert not missing, missing
        assert script_arguments(spec, rank) == argv


def test_torchrun(tmp_path: Path) -> None:
    _compared(tmp_path, ["torchrun", "--nproc_per_node", "2"])


def test_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    _compared(tmp_path, ["deepspeed", "--num_gpus", "2"])


def test_a_lone_process_gets_none(tmp_path: Path) -> None:
    spec = launch.parse(["python", "train.py"], {}, str(tmp_path))
    assert rank_environment(spec, 0) == {}


def test_the_card_is_described() -> None:
    env = card_environment(device("h100-80-sxm"), 1 << 34, 8)
    assert env["LAUNCHGUARD_CARD_TOTAL"] == str(1 << 34) and env["LAUNCHGUARD_CARD_MAJOR"] == "9" and env["LAUNCHGUARD_CARD_COUNT"] == "8"
    with pytest.raises(NotTold):
        card_environment(device("mi300x"), 1 << 34, 8)


def test_trackers_are_off_and_the_parent_is_untouched() -> None:
    env = {"WANDB_MODE": "online", "A": "1"}
    inside = contained(env, allow_network=False)
    assert inside["WANDB_MODE"] == "disabled" and inside["HF_HUB_OFFLINE"] == "1" and inside["A"] == "1"
    assert env == {"WANDB_MODE": "online", "A": "1"}
    assert "HF_HUB_OFFLINE" not in contained(env, allow_network=True)


def test_ranks(tmp_path: Path) -> None:
    spec = launch.parse(["torchrun", "--nproc_per_node", "4", "t.py"], {}, str(tmp_path))
    assert distinct_ranks(spec, None) == (0, 3)
    assert distinct_ranks(spec, "2,0") == (0, 2)
    for wrong in ("4", "-1", "a"):
        with pytest.raises(InputError):
            distinct_ranks(spec, wrong)
