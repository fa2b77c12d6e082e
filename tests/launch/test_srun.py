"""srun lines: the launch inside, the GPUs of the step, and where the two do not go together."""

from __future__ import annotations

import shlex

import pytest

from launchguard import launch
from launchguard.errors import InputError
from launchguard.job import LaunchSpec

TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 4 --master_addr n0 "


def parse(line: str, **env: str) -> LaunchSpec:
    return launch.parse(shlex.split(line), {"HOME": "/nonexistent", **env}, "/")


def codes(line: str, **env: str) -> list[str]:
    return [note.code for note in parse(line, **env).notes]


@pytest.mark.parametrize(
    "line",
    [
        "srun -N2 --ntasks-per-node=1 " + TORCHRUN + "--node_rank $SLURM_NODEID t.py",
        "srun --nodes 2 " + TORCHRUN + "--node_rank 0 t.py",
        "srun --nodes 2 " + TORCHRUN + "t.py",
        "srun --nodes 2 bash -c '" + TORCHRUN + "--node_rank 0 t.py'",
    ],
)
def test_one_rank_for_all_nodes(line: str) -> None:
    assert codes(line) == ["LG246"]
    assert parse(line).world_size == 8


@pytest.mark.parametrize(
    "line",
    [
        "srun --nodes=2 -l bash -c 'cd /x && " + TORCHRUN + "--node_rank ${SLURM_PROCID} t.py'",
        "srun --nodes 2 --exclusive torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint n0:1 t.py",
        "srun torchrun --nproc_per_node 4 t.py",
    ],
)
def test_sound_lines(line: str) -> None:
    assert codes(line) == []


def test_the_allocation_of_the_environment_counts() -> None:
    assert codes("srun " + TORCHRUN + "t.py", SLURM_NNODES="2", SLURM_NTASKS_PER_NODE="1(x2)") == ["LG246"]
    assert codes("srun " + TORCHRUN + "t.py", SLURM_NNODES="3", SLURM_NTASKS="3")[0] == "LG245"


@pytest.mark.parametrize("gpus", ["--gres=gpu:3", "--gres gpu:a100:3", "--gpus-per-node=3", "--gpus 3"])
def test_more_processes_than_the_step_has_gpus(gpus: str) -> None:
    with pytest.raises(InputError, match="the node gives 3 GPUs") as caught:
        parse(f"srun -N 1 {gpus} torchrun --nproc_per_node 8 t.py")
    assert caught.value.code == "LG249"


def test_gpus_of_the_step_are_those_of_the_node() -> None:
    assert parse("srun --gres=gpu:3 torchrun --nproc_per_node gpu t.py").world_size == 3


def test_launcher_in_every_task() -> None:
    assert codes("srun --ntasks-per-node 4 torchrun --nproc_per_node 4 t.py") == ["LG245"]


def test_srun_as_the_launcher_of_ranks() -> None:
    spec = parse("srun -N 2 -n 8 python t.py")
    assert (spec.nnodes, spec.nproc_per_node, [note.code for note in spec.notes]) == (2, 4, ["LG245"])


@pytest.mark.parametrize("line", ["srun -N 2", "srun -N 2 bash -c ''", "srun bash -c 'a \"'", "srun ./a.out"])
def test_refusals(line: str) -> None:
    with pytest.raises(InputError):
        parse(line)
