"""The readers against the installed libraries' own code: same defaults, same FSDP plugin arguments, same "auto" values.

One process imports transformers once (several seconds); nothing here touches a GPU or a process group.
"""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launchguard.configs import _installed, deepspeed_json
from launchguard.errors import InputError
from launchguard.job import Settings

transformers = pytest.importorskip("transformers")
TRAINER = ["torchrun", "--nproc_per_node", "4", "train.py", "--model_name_or_path", "m", "--output_dir", "o", "--max_seq_length", "8"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(
    ("library", "name"), [("transformers", "TrainingArguments"), ("trl", "SFTConfig"), ("trl", "DPOConfig"), ("trl", "ModelConfig")]
)
def test_defaults(library: str, name: str) -> None:
    module = pytest.importorskip(library)
    read = _installed.dataclass_fields(name)
    real = {field.name: field for field in dataclasses.fields(getattr(module, name)) if field.init}
    assert set(real) <= set(read)
    for key, field in real.items():
        if field.default is not dataclasses.MISSING:
            assert read[key].default == field.default, key


FSDP_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("full_shard auto_wrap", {}),
    ("shard_grad_op offload", {"transformer_layer_cls_to_wrap": ["A", "B"], "activation_checkpointing": True}),
    ("full_shard", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000, "fsdp_cpu_ram_efficient_loading": "true"}),
    ("full_shard", {"version": 1, "backward_prefetch": "backward_pre", "use_orig_params": "false", "limit_all_gathers": False}),
    ("hybrid_shard", {"version": 1, "forward_prefetch": True, "sync_module_states": False}),
    ("shard_grad_op", {"fsdp_version": 1, "transformer_layer_cls_to_wrap": "L"}),
]


@pytest.mark.parametrize(("fsdp", "config"), FSDP_CONFIGS)
def test_fsdp_arguments(work, fsdp: str, config: dict[str, Any]) -> None:
    """transformers.TrainingArguments._process_fsdp_args."""
    args = object.__new__(transformers.TrainingArguments)
    args.fsdp, args.fsdp_config, args.activation_checkpointing = fsdp, dict(config), False
    expected = args._process_fsdp_args()
    job = work.resolve([*TRAINER, "--fsdp", fsdp, "--fsdp_config", json.dumps(config)])
    assert job.fsdp is not None
    names = {"fsdp_version": "version", "auto_wrap_policy": "wrap_policy", "cpu_offload": "offload_params"}
    same = ("cpu_ram_efficient_loading", "min_num_params", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
    for key, value in expected.items():
        if key in names or key in same:
            assert getattr(job.fsdp, names.get(key, key)) == value, key
    assert job.fsdp.wrap_classes == tuple(filter(None, expected.get("transformer_cls_names_to_wrap", "").split(",")))
    if job.fsdp.version == 1:
        assert job.fsdp.sharding_strategy.lower() == expected["reshard_after_forward"]
        assert (job.fsdp.backward_prefetch or "NO_PREFETCH") == expected["backward_prefetch"]
    else:
        assert job.fsdp.reshard_after_forward == expected["reshard_after_forward"]
    assert (job.activation_checkpointing.via == "fsdp") == expected.get("activation_checkpointing", False)


AUTO = {
    "bf16": {"enabled": "auto"}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trainer_auto(work, stage: int) -> None:
    """transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig, both of its passes."""
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    tree = {**AUTO, "zero_optimization": {**AUTO["zero_optimization"], "stage": stage}}  # type: ignore[dict-item]
    defaults = {name: field.default for name, field in _installed.dataclass_fields("TrainingArguments").items()}
    stated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "bf16": True, "max_grad_norm": 0.5}
    args = SimpleNamespace(**{**defaults, **stated}, world_size=4, get_warmup_steps=lambda steps: 0)
    real = HfTrainerDeepSpeedConfig(json.loads(json.dumps(tree)))
    real.trainer_config_process(args)
    real.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 10)
    work.write("ds.json", tree)
    flags = [word for name, value in stated.items() for word in (f"--{name}", str(value))]
    job = work.resolve([*TRAINER, *flags, "--deepspeed", "ds.json"])
    assert job.zero is not None
    zero = real.config["zero_optimization"]
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if zero[key] != "auto":
            assert getattr(job.zero, key) == zero[key]
    assert (job.micro_batch_size, job.gradient_accumulation_steps) == (2, 3)
    assert real.config["train_batch_size"] == 2 * 3 * job.world_size
    assert job.max_grad_norm == real.config["gradient_clipping"]
    assert (job.zero.dtype == "bfloat16") == real.config["bf16"]["enabled"]


def test_fsdp_plugin_from_the_environment(work, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate.FullyShardedDataParallelPlugin built from the environment that the launch gives to ranks."""
    accelerate = pytest.importorskip("accelerate")
    text = ("distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: A,B\n"
            "  fsdp_reshard_after_forward: false\n  fsdp_activation_checkpointing: true\n  fsdp_offload_params: true\n")  # fmt: skip
    work.write("acc.yaml", text)
    job = work.resolve("accelerate launch --config_file acc.yaml train.py --model m --batch_size 1 --seq_len 8")
    monkeypatch.setattr(os, "environ", {**os.environ, **job.launch.environment})
    plugin = accelerate.FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    assert job.fsdp is not None
    assert plugin.reshard_after_forward == job.fsdp.reshard_after_forward
    assert tuple(plugin.transformer_cls_names_to_wrap) == job.fsdp.wrap_classes
    assert plugin.cpu_ram_efficient_loading == job.fsdp.cpu_ram_efficient_loading
    assert plugin.activation_checkpointing == job.activation_checkpointing.enabled
    assert bool(plugin.cpu_offload) == job.fsdp.offload_params
    policy = plugin.mixed_precision_policy
    assert str(policy.param_dtype) == f"torch.{job.precision.compute}" and str(policy.reduce_dtype) == f"torch.{job.precision.reduce}"


@pytest.mark.parametrize("tokens", [
    ["--bf16", "--fp16", "False"], ["--gradient_checkpointing"], ["--gradient-checkpointing", "False", "--optim=sgd"],
    ["--max_grad_norm", "0", "--report_to", "none"], ["--no_dataloader_pin_memory"], ["--fsdp", "full_shard auto_wrap"],
    ["--include_for_metrics", "a", "b", "--seed", "-1"], ["--deepspeed", "ds.json", "--logging_steps", "1e1"],
])  # fmt: skip
def test_arguments_like_hf_argument_parser(tokens: list[str]) -> None:
    """transformers.HfArgumentParser on the same words."""
    from launchguard.configs import script_args

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    real = vars(parser.parse_known_args(tokens)[0])
    for name, setting in script_args.parse(tokens, _installed.dataclass_fields("TrainingArguments")).items():
        assert real[name] == setting.value, name


sizes = st.one_of(st.none(), st.integers(1, 12))


@given(total=sizes, micro=sizes, steps=sizes)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batch_triple(total: int | None, micro: int | None, steps: int | None) -> None:
    """deepspeed.runtime.config.DeepSpeedConfig, which takes the world to be one rank here."""
    config = pytest.importorskip("deepspeed.runtime.config")
    tree = dict(zip(deepspeed_json._BATCH, (total, micro, steps)))
    tree = {key: value for key, value in tree.items() if value is not None}
    sources: Any = SimpleNamespace(launch=SimpleNamespace(world_size=1), settings=Settings())
    try:
        real = config.DeepSpeedConfig(dict(tree))
    except AssertionError:
        with pytest.raises(InputError):
            deepspeed_json.triple(sources, deepspeed_json.Document("ds.json", tree))
        return
    deepspeed_json.triple(sources, deepspeed_json.Document("ds.json", tree))
    assert sources.settings.get("micro_batch_size") == real.train_micro_batch_size_per_gpu
    assert sources.settings.get("gradient_accumulation_steps") == real.gradient_accumulation_steps
