"""The tables for hosts without the libraries, against the libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from launchguard.errors import InputError
from launchguard.profiles import library_defaults


def same(table: Any, real: Any) -> bool:
    value = real.value if isinstance(real, Enum) else real
    return value == table and isinstance(value, bool) == isinstance(table, bool)


def skip_other_version(library: str) -> Any:
    module = pytest.importorskip(library)
    if module.__version__.split("+")[0] != library_defaults(library).version:
        pytest.skip(f"the table is of {library} {library_defaults(library).version}, installed is {module.__version__}")
    return module


def section(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def test_transformers() -> None:
    skip_other_version("transformers")
    from transformers import TrainingArguments

    real = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    table = library_defaults("transformers").values
    assert {key: real[key] for key in table if not same(table[key], real[key])} == {}


def test_accelerate() -> None:
    skip_other_version("accelerate")
    from accelerate.commands.launch import launch_command_parser

    real = {action.dest: action.default for action in launch_command_parser()._actions}
    table = library_defaults("accelerate").values
    assert {key: real.get(key, "absent") for key in table if key not in ("gradient_accumulation_steps",) and not same(table[key], real.get(key, "absent"))} == {}  # fmt: skip # noqa: E501


def test_deepspeed() -> None:
    skip_other_version("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

    table = library_defaults("deepspeed").values
    classes = {
        "zero_optimization.offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param.": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.": DeepSpeedZeroConfig,
        "bf16.": DeepSpeedBF16Config,
        "fp16.": DeepSpeedFP16Config,
    }
    for prefix, cls in classes.items():
        real = {field.alias or name: field.default for name, field in cls.model_fields.items()}
        for key, value in section(table, prefix).items():
            if "." not in key:
                assert same(value, getattr(real[key], "val", real[key])) or str(real[key]) == "sys.maxsize", prefix + key


def test_text_and_unknown() -> None:
    assert str(library_defaults("deepspeed")) == "default of deepspeed 0.19.8"
    with pytest.raises(InputError, match="unknown library 'megatron'"):
        library_defaults("megatron")
