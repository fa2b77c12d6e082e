"""launchguard.yaml and launchguard's own options: precedence, conversion, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from launchguard.errors import InputError
from launchguard.job import InputTensor, Origin

CALLABLE = """
model:
  source: net:build
  kwargs: {width: 8}
  loss: sum
  inputs:
    x: {shape: [batch, 16], dtype: bf16}
    ids: {shape: [batch, seq], high: 100}
micro_batch_size: 3
seq_len: 20
strategy: fsdp2
fsdp: {wrap_classes: [Block, Head], reshard_after_forward: false}
precision: {params: float32, compute: bf16, reduce: float32}
optimizer: {name: sgd, implementation: foreach, params: {momentum: 0.9}}
device: h200
headroom: 5
"""


def test_callable_model(work) -> None:
    work.write("launchguard.yaml", CALLABLE)
    job = work.resolve("torchrun --nproc_per_node 4 train.py")
    assert (job.model.source, job.model.config, job.model.loss, job.model.kwargs) == ("net:build", None, "sum", {"width": 8})
    assert job.model.inputs == {"x": InputTensor(("batch", 16), "bfloat16"), "ids": InputTensor(("batch", "seq"), "int64", 100)}
    assert (job.strategy, job.micro_batch_size, job.seq_len, job.device, job.headroom) == ("fsdp2", 3, 20, "h200", "5")
    assert job.fsdp is not None and job.fsdp.wrap_classes == ("Block", "Head") and not job.fsdp.reshard_after_forward
    assert (job.fsdp.version, job.fsdp.wrap_policy, job.fsdp.accelerate_grouping) == (2, "MANUAL", False)
    assert (job.precision.load, job.precision.storage, job.precision.compute, job.precision.reduce) == ("float32",) * 2 + (
        "bfloat16",
        "float32",
    )
    assert (job.optimizer.name, job.optimizer.params) == ("sgd", {"momentum": 0.9})
    assert job.origin("fsdp.wrap_classes") == Origin("launchguard.yaml", "fsdp.wrap_classes")
    assert job.model.python_path == str(work.path)


def test_beside_the_script(work) -> None:
    work.write("src/launchguard.yaml", "seq_len: 7\n")
    assert work.resolve("python src/train.py --model m").seq_len == 7


def test_precedence(work) -> None:
    work.write("launchguard.yaml", "micro_batch_size: 2\nseq_len: 30\nmodel: {source: m}\n")
    line = "torchrun --nproc_per_node 2 train.py --output_dir o"
    assert work.resolve(line).micro_batch_size == 2  # over the library's default
    assert work.resolve(line + " --per_device_train_batch_size 5").micro_batch_size == 5  # under the script's argument
    job = work.resolve(line + " --per_device_train_batch_size 5", {"micro_batch_size": 6, "set": {"seq_len": "2e3"}})
    assert (job.micro_batch_size, job.seq_len) == (6, 2000)
    assert job.origin("micro_batch_size") == Origin("command line", "--micro-batch-size")
    assert job.origin("seq_len") == Origin("command line", "--set seq_len")


def test_over_the_deepspeed_json(work) -> None:
    work.write("ds.json", {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}})
    work.write("launchguard.yaml", "zero: {stage: 3}\nmodel: m\nseq_len: 8\n")
    job = work.resolve("deepspeed --num_gpus 2 train.py --deepspeed_config ds.json")
    assert job.zero is not None and job.zero.stage == 3
    assert job.origin("zero.stage") == Origin("launchguard.yaml", "zero.stage")


@pytest.mark.parametrize(
    ("text", "where", "fact"),
    [
        ("micro_batchsize: 2", "launchguard.yaml:micro_batchsize", "not a setting"),
        ("zero: {stagee: 2}", "launchguard.yaml:zero.stagee", "not a setting"),
        ("micro_batch_size: many", "launchguard.yaml:micro_batch_size", "not a int"),
        ("micro_batch_size: 1.5", "launchguard.yaml:micro_batch_size", "1.5"),
        ("strategy: zero4", "launchguard.yaml:strategy", "unknown strategy"),
        ("loop: mine", "launchguard.yaml:loop", "unknown loop"),
        ("precision: {params: fp23}", "launchguard.yaml:precision.params", "unknown dtype"),
        ("model: {inputs: {x: {dtype: int64}}}", "launchguard.yaml:model.inputs.x", "no shape"),
        ("model: {inputs: {x: {shape: [rows]}}}", "launchguard.yaml:model.inputs.x", "'rows'"),
        ("model: {inputs: {x: {shape: [1], range: 3}}}", "launchguard.yaml:model.inputs.x", "range"),
        ("a: [1", "launchguard.yaml:1:6", "not valid YAML"),
        ("- a", "launchguard.yaml", "holds a list"),
        ("versions: {}", "launchguard.yaml:versions", "not a setting"),
    ],
)
def test_refusals(work, text: str, where: str, fact: str) -> None:
    work.write("launchguard.yaml", text)
    with pytest.raises(InputError) as caught:
        work.resolve("python train.py --model m")
    assert caught.value.where == where and fact in caught.value.message and caught.value.help


def test_help_names_the_nearest_field(work) -> None:
    with pytest.raises(InputError) as caught:
        work.resolve("python train.py --model m", {"set": {"zero.stages": "2"}})
    assert "zero.stage" in caught.value.help and caught.value.where == "command line:--set zero.stages"


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("zero.reduce_bucket_size", "2e8", 200_000_000),
        ("activation_checkpointing.enabled", "true", True),
        ("fsdp.wrap_classes", "[A, B]", ("A", "B")),
        ("max_grad_norm", "null", None),
        ("headroom", "6GiB", "6GiB"),
        ("fsdp.reshard_after_forward", "4", 4),
        ("precision.load", "bf16", "bfloat16"),
    ],
)
def test_set_converts(work, field: str, text: str, value: object) -> None:
    job = work.resolve("torchrun --nproc_per_node 2 train.py --model m --seq_len 4 --batch_size 1", {"set": {field: text}})
    assert job.get(field) == value


def test_set_strategy_builds_its_part(work) -> None:
    line = "torchrun --nproc_per_node 2 train.py --model_name_or_path m --output_dir o --bf16 --max_length 8"
    job = work.resolve(line, {"set": {"strategy": "zero", "zero.stage": "3", "zero.dtype": "bfloat16"}})
    assert job.zero is not None and (job.zero.stage, job.precision.storage) == (3, "bfloat16")
    job = work.resolve(line, {"set": {"strategy": "fsdp2"}})
    assert job.fsdp is not None and job.fsdp.version == 2 and job.precision.storage == "float32"


def test_file_mode(work) -> None:
    from launchguard import configs, launch

    env = {"HOME": "/nonexistent", "HF_HUB_OFFLINE": "1"}
    spec = launch.without_command(env, str(work.path), gpus_per_node=8)
    work.write("ds.json", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"})
    job = configs.resolve(spec, {"deepspeed": "ds.json", "model": "m", "seq_len": 16, "micro_batch_size": 2, "validate": False})
    assert (job.loop, job.strategy, job.world_size, job.micro_batch_size) == ("trainer", "zero", 8, 2)
    work.write("fsdp.json", {"transformer_layer_cls_to_wrap": "L"})
    job = configs.resolve(spec, {"fsdp": "fsdp.json", "model": "m", "seq_len": 16})
    assert job.strategy == "fsdp2" and job.fsdp is not None and job.fsdp.wrap_classes == ("L",)
    assert job.origin("fsdp.wrap_classes") == Origin("fsdp.json", "transformer_layer_cls_to_wrap")
    work.write("job.yaml", CALLABLE)
    assert configs.resolve(spec, {"job": "job.yaml"}).model.source == "net:build"
    work.write("acc.yaml", "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n")
    spec = launch.without_command(env, str(work.path), accelerate_config="acc.yaml")
    assert configs.resolve(spec, {"accelerate": "acc.yaml", "model": "m"}).strategy == "fsdp2"


def test_what_depends_on_a_question_follows_it(work) -> None:
    work.write("ds.json", {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"})
    line = "torchrun --nproc_per_node 2 train.py --model_name_or_path m --output_dir o --max_length 8 --deepspeed ds.json"
    job = work.resolve(line, {"set": {"zero.stage": "3", "zero.offload_optimizer": "cpu"}})
    assert job.zero is not None and job.zero.overlap_comm and job.zero.zero_init
    assert job.optimizer.implementation == "cpu"
    assert job.origin("zero.stage") == Origin("command line", "--set zero.stage")


def test_conflicts_are_said(work) -> None:
    work.write("launchguard.yaml", "micro_batch_size: 2\nmodel: m\nseq_len: 8\n")
    job = work.resolve("python train.py", {"micro_batch_size": 4})
    assert [note.message for note in job.notes if note.code == "LG209"] == [
        "micro_batch_size is 4 (command line:--micro-batch-size), not 2 (launchguard.yaml:micro_batch_size)"
    ]


def test_the_cards_of_a_mixed_job_and_what_others_hold(work: Any) -> None:
    work.write("launchguard.yaml", "device: [a100-40-sxm, a100-80-sxm]\ndevice_used: 3GiB\n")
    job = work.resolve("torchrun --nproc_per_node 3 train.py --model_name_or_path m")
    assert (job.device, job.device_used) == ("a100-40-sxm,a100-80-sxm", "3GiB")
    assert work.resolve("python train.py --model_name_or_path m", {"device_used": "1GiB"}).device_used == "1GiB"
