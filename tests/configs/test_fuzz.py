"""Whatever stands in a file, the answer is a job or an InputError."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launchguard import configs, launch
from launchguard.errors import InputError
from launchguard.job import FsdpSpec, JobSpec, ZeroSpec

ENV = {"HOME": "/nonexistent", "HF_HUB_OFFLINE": "1"}
MODEL = {"hidden_size": 64, "vocab_size": 10, "max_position_embeddings": 32, "dtype": "bfloat16"}
texts = st.sampled_from("auto cpu fp16 x".split())
scalars = st.one_of(st.none(), st.booleans(), st.integers(-2, 10**10), st.floats(allow_nan=False), texts)
inner_keys = st.sampled_from(["device", "enabled", "type", "dtype", "params"])
values = st.recursive(scalars, lambda part: st.one_of(st.lists(part, max_size=2), st.dictionaries(inner_keys, part)))
ZERO_FIELDS = [field.name for field in dataclasses.fields(ZeroSpec)]
FSDP_FIELDS = [field.name for field in dataclasses.fields(FsdpSpec)]
zero_keys = st.sampled_from(["offload_optimizer", "offload_param", "cpu_offload", *ZERO_FIELDS])
ds_keys = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16 optimizer "
    "communication_data_type data_types torch_autocast tensor_parallel sequence_parallel_size compile pipeline"
).split()
ds_trees = st.fixed_dictionaries({}, optional={"zero_optimization": st.one_of(st.dictionaries(zero_keys, values), values)}).flatmap(
    lambda base: st.dictionaries(st.sampled_from(ds_keys), values).map(lambda more: {**more, **base})
)
fsdp_keys = st.sampled_from(["version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", *FSDP_FIELDS])
fsdp_trees = st.dictionaries(fsdp_keys, values)
job_keys = st.sampled_from([*configs.job_file._PARTS, "strategy", "loop", "seq_len", "device", "compile"])
argument_keys = st.sampled_from(
    "per_device_train_batch_size bf16 max_length dtype optim use_peft lora_r fsdp lora_target_modules load_in_4bit gradient_checkpointing "
    "gradient_checkpointing_kwargs deepspeed max_grad_norm optim_args use_liger_kernel attn_implementation lora_alpha".split()
)
model_keys = st.sampled_from("hidden_size dtype max_position_embeddings text_config hidden_sizes vocab_size image_size".split())


def answer(line: list[str], files: dict[str, Any]) -> None:
    """Resolve a launch line among files; an InputError is an answer too."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"m.json": MODEL, **files}.items():
            (Path(folder) / name).write_text(yaml.safe_dump(content) if name.endswith(".yaml") else json.dumps(content))
        with contextlib.suppress(InputError):
            assert isinstance(configs.resolve(launch.parse(line, ENV, folder), {"validate": False}), JobSpec)


@pytest.mark.parametrize("loop", ["trainer", "deepspeed"])
@given(tree=ds_trees)
@settings(max_examples=30, deadline=None)
def test_deepspeed_json(loop: str, tree: dict[str, Any]) -> None:
    line = "torchrun --nproc_per_node 2 train.py --model_name_or_path m.json".split()
    answer(
        line + (["--output_dir", "o", "--deepspeed", "ds.json"] if loop == "trainer" else ["--deepspeed_config", "ds.json"]),
        {"ds.json": tree},
    )


@given(tree=fsdp_trees)
@settings(max_examples=30, deadline=None)
def test_fsdp_config(tree: dict[str, Any]) -> None:
    line = "torchrun --nproc_per_node 2 train.py --model_name_or_path m.json --fsdp full_shard --fsdp_config f.json".split()
    answer(line, {"f.json": tree})


@given(
    tree=st.dictionaries(
        st.sampled_from([*configs.job_file._PARTS, "strategy", "loop", "seq_len", "device", "compile"]), st.one_of(values, fsdp_trees)
    )
)
@settings(max_examples=30, deadline=None)
def test_job_file(tree: dict[str, Any]) -> None:
    answer("torchrun --nproc_per_node 2 train.py --model m.json".split(), {"launchguard.yaml": tree})


@given(tree=st.dictionaries(argument_keys, values))
@settings(max_examples=30, deadline=None)
def test_script_config_file(tree: dict[str, Any]) -> None:
    answer("python sft.py --config c.yaml --model_name_or_path m.json".split(), {"c.yaml": tree})


@given(tree=st.dictionaries(model_keys, values))
@settings(max_examples=25, deadline=None)
def test_model_config(tree: dict[str, Any]) -> None:
    ds = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    answer(
        "torchrun --nproc_per_node 2 t.py --output_dir o --model_name_or_path n.json --deepspeed ds.json".split(),
        {"n.json": tree, "ds.json": ds},
    )
