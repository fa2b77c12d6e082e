"""Plugins that a script hands to its Accelerator: FullyShardedDataParallelPlugin(...) and DeepSpeedPlugin(...).

Their fields are the variables of the ranks' environment under other names: a field that is given wins, one that is not is read from
there (accelerate 1.15 utils/dataclasses.py: __post_init__ of both; accelerator.py:Accelerator.__init__ turns the method on).
"""

from __future__ import annotations

from collections.abc import Mapping

from launchguard.configs._sources import Sources
from launchguard.job import Origin, Setting

_FSDP = {
    "fsdp_version": "FSDP_VERSION", "sharding_strategy": "FSDP_SHARDING_STRATEGY", "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH", "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY", "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "state_dict_type": "FSDP_STATE_DICT_TYPE", "use_orig_params": "FSDP_USE_ORIG_PARAMS", "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH", "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING", "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
}  # fmt: skip
_DEEPSPEED = {
    "hf_ds_config": "ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}  # fmt: skip
_CLASSES = (  # class, keyword of Accelerator, variable that it turns on, field -> variable
    ("FullyShardedDataParallelPlugin", "fsdp_plugin", "ACCELERATE_USE_FSDP", _FSDP),
    ("DeepSpeedPlugin", "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED", _DEEPSPEED),
)


def variables(sources: Sources) -> Mapping[str, Setting]:
    """Variable -> value of the plugins that the script's Accelerator takes; only a hand-written loop makes its own.

    Without ranks FSDP is not turned on (accelerate 1.15 state.py:AcceleratorState.__init__ asks for a distributed type first).
    """
    accelerator = sources.source.first("Accelerator") if sources.loop == "accelerate" else None
    found: dict[str, Setting] = {}
    for name, keyword, switch, fields in _CLASSES:
        call = sources.source.first(name)
        if call is None or accelerator is None or keyword not in accelerator.names:
            continue
        if name.startswith("Fully") and sources.launch.world_size == 1 and sources.launch.launcher != "torchrun":
            continue
        found[switch] = Setting("true", call.origin)
        found.update({fields[key]: setting for key, setting in call.keywords.items() if key in fields and setting.value is not None})
        if "auto_wrap_policy" in call.names and "auto_wrap_policy" not in call.keywords:
            found.update(_callable_policy(sources, call.origin))
    return found


def _callable_policy(sources: Sources, origin: Origin) -> Mapping[str, Setting]:
    """A policy made by functools.partial or the like: its layer classes where they can be read."""
    classes = sources.source.wrapped_classes()
    found = {"FSDP_AUTO_WRAP_POLICY": Setting("TRANSFORMER_BASED_WRAP", origin)}
    if classes is None:
        message = "the wrap policy of the script cannot be read: predicted as one unit for each of the model's own layers"
        sources.settings.note("LG214", "warning", message, origin)
        return found
    return {**found, "FSDP_TRANSFORMER_CLS_TO_WRAP": classes}
