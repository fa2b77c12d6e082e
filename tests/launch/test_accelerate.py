"""Accelerate's merge of flags, config file and defaults, and what it passes to ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launchguard import launch
from launchguard.errors import InputError
from launchguard.job import LaunchSpec

FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: bf16
num_processes: 16
num_machines: 2
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
"""


def parse(line: str, cwd: Path, **env: str) -> LaunchSpec:
    return launch.parse(line.split(), {"HOME": "/nonexistent", **env}, str(cwd))


def test_config_file(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(FSDP2)
    spec = parse("accelerate launch --config_file acc.yaml train.py", tmp_path)
    assert (spec.nnodes, spec.nproc_per_node) == (2, 8)
    assert spec.environment["FSDP_VERSION"] == "2"
    assert spec.environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert spec.environment["ACCELERATE_USE_FSDP"] == "true"
    assert str(spec.world_size_origin) == "acc.yaml:num_processes"
    assert str(spec.arguments["fsdp_version"].origin) == "acc.yaml:fsdp_config.fsdp_version"
    assert str(spec.arguments["fsdp_auto_wrap_policy"].origin) == "acc.yaml:fsdp_config.auto_wrap_policy"
    assert str(spec.arguments["mixed_precision"].origin) == "acc.yaml:mixed_precision"
    assert spec.arguments["fsdp_offload_params"].origin.source.startswith("default of accelerate ")


def test_flag_beats_config_file(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(FSDP2)
    spec = parse("accelerate launch --config_file acc.yaml --num_processes 4 --mixed_precision fp16 train.py", tmp_path)
    assert spec.world_size == 4
    assert spec.environment["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert str(spec.arguments["mixed_precision"].origin) == "command line:--mixed_precision"


def test_users_default_config_is_used_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    spec = parse("accelerate launch train.py", tmp_path, HF_HOME=str(tmp_path / "hf"))
    assert spec.world_size == 4
    assert [note.code for note in spec.notes] == ["LG208"]
    assert parse("accelerate launch --num_processes 2 train.py", tmp_path, HF_HOME=str(tmp_path)).config_file is None


def test_deepspeed_environment(tmp_path: Path) -> None:
    spec = parse("accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4 --mixed_precision bf16 train.py", tmp_path)
    assert spec.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert spec.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert "MASTER_PORT" not in spec.environment and "PYTHONPATH" not in spec.environment


def test_no_distributed_type_starts_one_process(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    spec = parse("accelerate launch --config_file acc.yaml --num_processes 8 train.py", tmp_path)
    assert spec.world_size == 1
    assert "starts one process" in spec.notes[0].message


def test_total_over_machines_must_reach_each(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(FSDP2.replace("num_processes: 16", "num_processes: 1"))
    with pytest.raises(InputError, match="total over machines"):
        parse("accelerate launch --config_file acc.yaml train.py", tmp_path)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("distributed_type: MULTI_GPU\nbogus_key: 1\n", "unknown keys"),
        ("num_processes: 2\n", "distributed_type"),
        ("distributed_type: SOMETHING\nnum_processes: 2\n", "SOMETHING"),
        ("distributed_type: MULTI_GPU\n", "num_processes"),
        ("a: b: c\n", "mapping values"),
    ],
)
def test_bad_config_files(text: str, fact: str, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        parse("accelerate launch --config_file acc.yaml train.py", tmp_path)
    assert fact in caught.value.message


def test_from_config_file(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(FSDP2)
    spec = launch.without_command({"HOME": "/nonexistent"}, str(tmp_path), accelerate_config="acc.yaml")
    assert (spec.launcher, spec.script, spec.world_size) == ("accelerate", None, 16)


def test_imports_stay_small() -> None:
    code = (
        "import sys; from launchguard import launch; launch.parse('accelerate launch --num_processes 2 t.py'.split(), {'HOME': '/x'}, '/');"
        "print([m for m in ('transformers', 'deepspeed', 'trl', 'peft') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_package_import_is_torch_free() -> None:
    code = "import sys; import launchguard.launch, launchguard.configs; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(FSDP2 + "parallelism_config: {}\n")
    prefix = ("LG234", "acc.yaml:fsdp_config.auto_wrap_policy")  # the one key without fsdp_, which accelerate adds
    notes = parse("accelerate launch --config_file acc.yaml train.py", tmp_path).notes
    assert [(note.code, note.origin) for note in notes] == [prefix]
    (tmp_path / "acc.yaml").write_text(FSDP2.replace("  fsdp_version: 2", "  fsdp_version: 2\n  limit_all_gather: true"))
    notes = parse("accelerate launch --config_file acc.yaml train.py", tmp_path).notes
    assert [(note.code, note.origin) for note in notes] == [("LG225", "acc.yaml:fsdp_config.limit_all_gather"), prefix]


def test_fewer_gpu_ids_than_processes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leaves 2 GPUs") as caught:
        parse("accelerate launch --multi_gpu --num_processes 4 --gpu_ids 0,1 train.py", tmp_path)
    assert caught.value.code == "LG249"
    notes = parse("accelerate launch --multi_gpu --num_processes 2 --gpu_ids 2,5 train.py", tmp_path).notes
    assert [note.code for note in notes] == ["LG240"] and "GPU 0 is 2, 1 is 5" in notes[0].message


@pytest.mark.parametrize("line", ["accelerate launch --num_processes 1 t.py --num_processes=8", "torchrun t.py --nproc-per-node 8"])
def test_flags_behind_the_script(line: str, tmp_path: Path) -> None:
    spec = parse(line, tmp_path)
    assert spec.world_size == 1
    assert [note.code for note in spec.notes] == ["LG216"]
