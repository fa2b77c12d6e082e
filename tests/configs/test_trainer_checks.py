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
