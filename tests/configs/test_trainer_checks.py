"""What the Trainer refuses at start, against the installed TrainingArguments where it can be made without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from launchguard.errors import InputError

LINE = "python t.py --model_name_or_path m --output_dir o --per_device_train_batch_size 1 --max_length 8"
REFUSED: list[dict[str, Any]] = [
    {"dataloader_prefetch_factor": 2},
    {"logging_steps": 0},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"warmup_steps": -1},
    {"load_best_model_at_end": True},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "steps"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
]
ACCEPTED: list[dict[str, Any]] = [
    {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4},
    {"load_best_model_at_end": True, "save_strategy": "best"},
    {"logging_steps": 0, "logging_strategy": "no"},
]


def _line(arguments: dict[str, Any]) -> str:
    return " ".join([LINE, *(f"--{name} {value}" for name, value in arguments.items())])


@pytest.mark.parametrize("arguments", REFUSED)
def test_refused_as_by_the_library(work, arguments: dict[str, Any]) -> None:
    training_args = pytest.importorskip("transformers").TrainingArguments
    with pytest.raises(ValueError):
        training_args(output_dir="o", use_cpu=True, **arguments)
    with pytest.raises(InputError) as caught:
        work.resolve(_line(arguments))
    assert caught.value.code == "LG261"


@pytest.mark.parametrize("arguments", ACCEPTED)
def test_accepted_as_by_the_library(work, arguments: dict[str, Any]) -> None:
    training_args = pytest.importorskip("transformers").TrainingArguments
    training_args(output_dir="o", use_cpu=True, **arguments)
    work.resolve(_line(arguments))


def test_save_only_model_with_a_sharded_wrapper(work) -> None:
    work.write("ds.json", '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}')
    asked = _line({"save_only_model": True, "load_best_model_at_end": True, "save_strategy": "best"})
    work.resolve(asked)
    with pytest.raises(InputError, match="save_only_model"):
        work.resolve(asked + " --deepspeed ds.json")


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("--lr_scheduler_type cosin", "cosin is not a valid SchedulerType"),
        ("--save_strategy sometimes", "sometimes is not a valid SaveStrategy"),
        ("--optim adamw_torchh", "adamw_torchh is not a valid OptimizerNames"),
        ("--fp16_full_eval --bf16_full_eval", "at most one of fp16 and bf16"),
        ("--per_device_train_batch_size many", "not a value of type int"),
        ("--fsdp hybrid_shard", "exists in FSDP1 only"),
        ("--fsdp full_shard --fsdp_config none.json", "does not exist"),
    ],
)
def test_values_that_training_arguments_refuse(work, arguments: str, text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        work.resolve(f"torchrun --nproc_per_node 2 t.py --model_name_or_path m --output_dir o --max_length 8 {arguments}")
    assert caught.value.code == "LG261"


@pytest.mark.parametrize("value", ["cosine", "COSINE", "cosine_with_min_lr", "constant"])
def test_schedulers_of_transformers_are_let_through(work, value: str) -> None:
    line = f"torchrun --nproc_per_node 2 t.py --model_name_or_path m --output_dir o --max_length 8 --lr_scheduler_type {value}"
    assert work.resolve(line).strategy == "ddp"


GRPO = "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(model='m', args=GRPOConfig(%s))\n"


@pytest.mark.parametrize(
    "config, text",
    [
        ("per_device_train_batch_size=4, num_generations=3", r"generation_batch_size \(8\) must be divisible by num_generations \(3\)"),
        ("per_device_train_batch_size=4, num_generations=1", "at least 2"),
        ("per_device_train_batch_size=4, num_generations=4, auto_find_batch_size=True", "GRPO refuses it"),
        ("per_device_train_batch_size=3, gradient_accumulation_steps=4, num_generations=8", ""),
        ("per_device_train_batch_size=3, steps_per_generation=2, gradient_accumulation_steps=4, num_generations=8", "divisible"),
    ],
)
def test_groups_of_completions(work, codes, config: str, text: str) -> None:
    work.write("t.py", GRPO % config)
    if not text:
        assert "LG263" in codes(work.resolve("accelerate launch --num_processes 2 t.py"))
        return
    with pytest.raises(InputError, match=text) as caught:
        work.resolve("accelerate launch --num_processes 2 t.py")
    assert caught.value.code == "LG261"


@pytest.mark.parametrize(
    "script, arguments, named",
    [
        ("Trainer(model=None, args=TrainingArguments(output_dir='o', evaluation_strategy='no'))", "", "evaluation_strategy"),
        ("Trainer(model=None, args=TrainingArguments(output_dir='o'), tokenizer=t)", "", "tokenizer"),
        ("Trainer(model=None, args=TrainingArguments(output_dir='o', eval_strategy='no'), processing_class=t)", "", ""),
        ("HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", "--warmup_ratio 0.1", "warmup_ratio"),
        ("HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", "--warmup_steps 0.1", ""),
        ("TrlParser(SFTConfig).parse_args_and_config()", "--config c.yaml", ""),
        ("import own\nHfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", "--warmup_ratio 0.1", ""),
        ("HfArgumentParser(T).parse_args_into_dataclasses(return_remaining_strings=True)", "--warmup_ratio 0.1", ""),
    ],
)
def test_arguments_that_the_installed_libraries_do_not_have(work, script: str, arguments: str, named: str) -> None:
    work.write("t.py", f"from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n{script}\n")
    work.write("c.yaml", "seed: 1\n")
    line = f"torchrun --nproc_per_node 2 t.py --output_dir o --max_length 8 {arguments}"
    found = [note for note in work.resolve(line, {"model": "m"}).notes if note.code == "LG262"]
    names = [note.message.split(" has no argument ")[1].split()[0] for note in found]
    assert [name for name in names if name != "max_length"] == ([named] if named else [])
    assert all(note.severity == "error" for note in found)
