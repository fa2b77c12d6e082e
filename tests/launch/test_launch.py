"""Launch lines of every launcher, read by the installed parsers; nothing is started, os.environ stays as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchguard import launch
from launchguard.errors import InputError
from launchguard.job import LaunchSpec
from launchguard.launch import _gpus

ENV = {"HOME": "/nonexistent"}


def parse(line: str, env: dict[str, str] | None = None, cwd: str = "/", gpus_per_node: int | None = None) -> LaunchSpec:
    return launch.parse(line.split(), {**ENV, **(env or {})}, cwd, gpus_per_node)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpus, "nvml_gpus", lambda: 0)


def test_order() -> None:
    assert launch.launchers()[-1] == "python"  # it would take every `python -m ...`
    assert set(launch.launchers()) >= {"accelerate", "deepspeed", "torchrun"}


@pytest.mark.parametrize(
    ("line", "launcher", "script", "args", "nnodes", "nproc"),
    [
        ("accelerate launch --num_processes 8 train.py --a 1", "accelerate", "train.py", ("--a", "1"), 1, 8),
        ("accelerate-launch --num_processes 2 train.py", "accelerate", "train.py", (), 1, 2),
        ("python -m accelerate.commands.launch --num_processes 2 train.py", "accelerate", "train.py", (), 1, 2),
        ("accelerate launch --num_processes 1 train.py", "accelerate", "train.py", (), 1, 1),
        ("accelerate launch --cpu train.py", "accelerate", "train.py", (), 1, 1),
        (
            "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip a t.py",
            "accelerate", "t.py", (), 2, 8,
        ),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "deepspeed", "train.py", ("--deepspeed", "ds.json"), 1, 4),
        ("deepspeed --include localhost:0,3 train.py", "deepspeed", "train.py", (), 1, 2),
        ("deepspeed --num_gpus 2 --module pkg.train x", "deepspeed", "pkg.train", ("x",), 1, 2),
        ("/opt/bin/torchrun --nproc_per_node=8 --nnodes=2 train.py a --b", "torchrun", "train.py", ("a", "--b"), 2, 8),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", "torchrun", "train.py", (), 4, 8),
        ("python3.11 -m torch.distributed.run --nproc_per_node 2 -m pkg.train", "torchrun", "pkg.train", (), 1, 2),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py", "torchrun", "train.py", (), 1, 2),
        ("torchrun train.py", "torchrun", "train.py", (), 1, 1),
        ("python -u train.py --x", "python", "train.py", ("--x",), 1, 1),
        ("python -X dev -W ignore -um pkg.train --x", "python", "pkg.train", ("--x",), 1, 1),
        ("./train.py --x", "python", "./train.py", ("--x",), 1, 1),
    ],
)  # fmt: skip
def test_launch_lines(line: str, launcher: str, script: str, args: tuple[str, ...], nnodes: int, nproc: int) -> None:
    before = dict(os.environ)
    spec = parse(line)
    assert (spec.launcher, spec.script, spec.script_args, spec.nnodes, spec.nproc_per_node) == (launcher, script, args, nnodes, nproc)
    assert spec.argv == tuple(line.split())
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("line", "fact", "remedy"),
    [
        ("mpirun train.py", "unknown launcher 'mpirun'", "accelerate"),
        ("accelerate launch --bogus 1 train.py", "unrecognized arguments: --bogus", "--help"),
        ("accelerate launch --num_processes 2", "training_script", ""),
        ("accelerate launch --multi_gpu --use_fsdp --num_processes 2 t.py", "only use one of", ""),
        ("deepspeed --bogus train.py", "unrecognized arguments", "--help"),
        ("deepspeed train.py", "no GPU can be seen", "--num_gpus"),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py", "no hostfile", "--hostfile"),
        ("deepspeed --hostfile nowhere train.py", "no hostfile at nowhere", ""),
        ("deepspeed --include localhost:0 --num_gpus 1 train.py", "cannot be given with", ""),
        ("torchrun --nproc_per_node gpu train.py", "no GPU can be seen", "--nproc_per_node"),
        ("torchrun --nproc_per_node many train.py", "many", "number"),
        ("torchrun", "required", ""),
        ("torchrun --help", "exit", ""),
        ("accelerate launch train.py", "no GPU can be seen", "--num_processes"),
        ("python", "runs no script", "script.py"),
        ("python -c pass", "runs no script", ""),
        ("accelerate launch --config_file nowhere.yaml t.py", "no Accelerate config at nowhere.yaml", ""),
    ],
)
def test_refusals_state_fact_and_remedy(line: str, fact: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse(line)
    assert fact in caught.value.message
    assert remedy in caught.value.help
    assert capsys.readouterr() == ("", "")


def test_no_command() -> None:
    with pytest.raises(InputError):
        launch.parse([], ENV, "/")


class TestGpuCount:
    def test_cuda_visible_devices(self) -> None:
        spec = parse("deepspeed train.py", {"CUDA_VISIBLE_DEVICES": "0,2,5"})
        assert spec.nproc_per_node == 3
        assert str(spec.world_size_origin) == "environment:CUDA_VISIBLE_DEVICES"

    def test_hidden_devices(self) -> None:
        with pytest.raises(InputError, match="hides every GPU"):
            parse("torchrun --nproc_per_node gpu t.py", {"CUDA_VISIBLE_DEVICES": ""})

    @pytest.mark.parametrize("line", ["deepspeed t.py", "torchrun --nproc_per_node auto t.py", "accelerate launch t.py"])
    def test_gpus_per_node_option(self, line: str) -> None:
        assert parse(line, gpus_per_node=8).nproc_per_node == 8

    def test_nvml(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_gpus, "nvml_gpus", lambda: 4)
        assert parse("deepspeed t.py").nproc_per_node == 4
        assert parse("deepspeed --exclude localhost:1 t.py").nproc_per_node == 3

    def test_num_gpus_beats_visible_devices_with_a_note(self) -> None:
        spec = parse("deepspeed --num_gpus 2 t.py", {"CUDA_VISIBLE_DEVICES": "0"})
        assert spec.nproc_per_node == 2
        assert [note.code for note in spec.notes] == ["LG205"]

    @pytest.mark.parametrize(("text", "count"), [("0,1", 2), ("0,-1,2", 1), ("-1", 0), ("GPU-abc,MIG-def", 2), ("0,,1", 1)])
    def test_visible_devices_end_at_the_first_invalid_one(self, text: str, count: int) -> None:
        assert len(_gpus.visible_devices({"CUDA_VISIBLE_DEVICES": text}) or []) == count


class TestHostfile:
    def write(self, folder: Path, text: str) -> str:
        (folder / "hosts").write_text(text)
        return str(folder)

    def test_pool(self, tmp_path: Path) -> None:
        cwd = self.write(tmp_path, "# comment\na slots=8\nb slots=8\nc slots=8\n")
        spec = parse("deepspeed --hostfile hosts t.py", cwd=cwd)
        assert (spec.nnodes, spec.nproc_per_node) == (3, 8)
        assert parse("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 4 t.py", cwd=cwd).world_size == 8
        assert parse("deepspeed --hostfile hosts --include a@b:0,1,2,3,4,5,6,7 t.py", cwd=cwd).world_size == 16

    def test_uneven(self, tmp_path: Path) -> None:
        cwd = self.write(tmp_path, "a slots=8\nb slots=4\n")
        with pytest.raises(InputError, match=r"a: 8, b: 4"):
            parse("deepspeed --hostfile hosts t.py", cwd=cwd)

    def test_malformed(self, tmp_path: Path) -> None:
        cwd = self.write(tmp_path, "a slots=eight\n")
        with pytest.raises(InputError, match="bad entry"):
            parse("deepspeed --hostfile hosts t.py", cwd=cwd)


class TestPython:
    def test_world_of_an_outer_launcher(self) -> None:
        spec = parse("python t.py", {"WORLD_SIZE": "16", "RANK": "3", "LOCAL_WORLD_SIZE": "8"})
        assert (spec.nnodes, spec.nproc_per_node) == (2, 8)

    def test_world_size_without_rank_is_ignored(self) -> None:
        assert parse("python t.py", {"WORLD_SIZE": "16"}).world_size == 1

    @pytest.mark.parametrize("env", [{"WORLD_SIZE": "x", "RANK": "0"}, {"WORLD_SIZE": "6", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}])
    def test_bad_world(self, env: dict[str, str]) -> None:
        with pytest.raises(InputError):
            parse("python t.py", env)

    def test_many_gpus_in_sight_of_one_process(self) -> None:
        assert parse("python t.py", gpus_per_node=8).gpus_in_sight == 8


def test_wrappers_are_named() -> None:
    spec = parse("env A=1 nohup uv run torchrun --nproc_per_node 2 t.py")
    assert (spec.launcher, spec.argv[0]) == ("torchrun", "env")
    assert "uv run" in spec.notes[-1].message


def test_assignments_reach_the_parsers() -> None:
    assert parse("CUDA_VISIBLE_DEVICES=0,1 deepspeed t.py").nproc_per_node == 2


def test_ranks_inherit_what_matters_but_no_token() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_TOKEN": "x", "PATH": "/bin", "ACCELERATE_MIXED_PRECISION": "bf16"}
    kept = parse("torchrun t.py", env).environment
    assert {"PYTORCH_CUDA_ALLOC_CONF", "ACCELERATE_MIXED_PRECISION"} <= set(kept)
    assert not {"HF_TOKEN", "PATH"} & set(kept)


def test_without_command() -> None:
    spec = launch.without_command(ENV, "/", gpus_per_node=8, nnodes=2)
    assert (spec.script, spec.world_size, spec.argv) == (None, 16, ())
    with pytest.raises(InputError):
        launch.without_command(ENV, "/")


LLAMA_FACTORY = "llamafactory.launcher"


@pytest.mark.parametrize(
    ("line", "env", "gpus", "launcher", "script", "args", "nnodes", "nproc"),
    [
        ("llamafactory-cli train a.yaml bf16=true", {}, 8, "torchrun", LLAMA_FACTORY, ("a.yaml", "bf16=true"), 1, 8),
        ("llamafactory-cli train a.yaml", {"CUDA_VISIBLE_DEVICES": "3"}, 8, "python", LLAMA_FACTORY, ("a.yaml",), 1, 1),
        ("lmf train a.yaml", {"FORCE_TORCHRUN": "1"}, 1, "torchrun", LLAMA_FACTORY, ("a.yaml",), 1, 1),
        ("lmf train a", {"FORCE_TORCHRUN": "1", "NNODES": "2", "NPROC_PER_NODE": "4"}, None, "torchrun", LLAMA_FACTORY, ("a",), 2, 4),
        ("axolotl train c.yml --num-processes 4 --lora_r=8", {}, None, "accelerate", "axolotl.cli.train", ("c.yml", "--lora_r=8"), 1, 4),
        ("axolotl train c.yml --launcher torchrun -- --nproc_per_node=2", {}, None, "torchrun", "axolotl.cli.train", ("c.yml",), 1, 2),
        ("axolotl train c.yml --launcher=python", {}, 1, "python", "axolotl.cli.train", ("c.yml",), 1, 1),
        ("trl sft --num_processes 4 --lr 1 --bf16", {}, None, "accelerate", "trl.scripts.sft", ("--lr", "1", "--bf16"), 1, 4),
        ("trl dpo --output_dir o --accelerate_config zero2", {}, None, "accelerate", "trl.scripts.dpo", ("--output_dir", "o"), 1, 8),
    ],
)  # fmt: skip
def test_programs_that_call_a_launcher(
    line: str, env: dict[str, str], gpus: int | None, launcher: str, script: str, args: tuple[str, ...], nnodes: int, nproc: int
) -> None:
    spec = parse(line, env, gpus_per_node=gpus)
    assert (spec.launcher, spec.script, spec.script_args, spec.nnodes, spec.nproc_per_node) == (launcher, script, args, nnodes, nproc)
    assert spec.argv == tuple(line.split())


def test_trl_takes_the_launchers_keys_out_of_its_config_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\naccelerate_config: fsdp2\nnum_processes: 2\n")
    spec = parse("trl sft --config c.yaml", cwd=str(tmp_path))
    assert (spec.nproc_per_node, spec.environment["FSDP_VERSION"], spec.script_args) == (2, "2", ("--config", "c.yaml"))
    with pytest.raises(InputError) as caught:
        parse("trl sft --accelerate_config zero9")
    assert caught.value.code == "LG250"


@pytest.mark.parametrize("line", ["llamafactory-cli version", "axolotl preprocess c.yml", "trl env"])
def test_programs_that_train_nothing(line: str) -> None:
    with pytest.raises(InputError, match="trains nothing"):
        parse(line)
