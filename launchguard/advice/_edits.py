"""Where a change is made: the user's own file and key, from the origin of the field, or where that kind of job would set it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchguard.job import TRAINER_LOOPS, JobSpec
from launchguard.verdict import Change

TRAINER_FLAGS = {
    "micro_batch_size": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "activation_checkpointing.enabled": "--gradient_checkpointing",
    "strategy": "--fsdp",
    "evaluation.accumulation_steps": "--eval_accumulation_steps",
    "evaluation.batch_size": "--per_device_eval_batch_size",
}
DEEPSPEED_KEYS = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "zero.stage": "zero_optimization.stage",
}
FSDP_KEYS = {
    "fsdp.sharding_strategy": "fsdp_config.fsdp_sharding_strategy",
    "fsdp.reshard_after_forward": "fsdp_config.fsdp_reshard_after_forward",
    "activation_checkpointing.enabled": "fsdp_config.fsdp_activation_checkpointing",
    "fsdp.state_dict_type": "fsdp_config.fsdp_state_dict_type",
    "fsdp.cpu_ram_efficient_loading": "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "fsdp.sync_module_states": "fsdp_config.fsdp_sync_module_states",
}
SCRIPT = {
    "micro_batch_size": "the data loader's batch size",
    "gradient_accumulation_steps": "accumulation in the training loop",
    "activation_checkpointing.enabled": "model.gradient_checkpointing_enable()",
    "fsdp.reshard_after_forward": "fully_shard(reshard_after_forward=...)",
    "fsdp.sharding_strategy": "FullyShardedDataParallel(sharding_strategy=...)",
    "strategy": "the wrapper round the model",
}
DERIVED = ("precision", "fsdp", "ddp", "zero.zero_init", "activation_checkpointing.via", "activation_checkpointing.use_reentrant")


def edits_of(job: JobSpec, changes: Mapping[str, Any]) -> tuple[Change, ...]:
    """One Change for every field that a user sets; fields that follow from another (DERIVED) are left out."""
    edits = []
    for field, new in changes.items():
        if field in DERIVED:
            continue
        file, key = _place(job, field)
        edits.append(Change(file, key, _old(job, field), _spelled(field, new)))
    return tuple(edits)


def _old(job: JobSpec, field: str) -> Any:
    return job.get(field) if field in job.origins else None


def _spelled(field: str, new: Any) -> Any:
    return "full_shard" if field == "strategy" else new


def _place(job: JobSpec, field: str) -> tuple[str, str]:
    if field == "allocator_conf":
        return "environment", "PYTORCH_CUDA_ALLOC_CONF"
    origin = job.origin(field)
    if field in job.origins and origin.key and not origin.source.startswith("default of") and field != "strategy":
        return origin.source, origin.key
    if job.loop in TRAINER_LOOPS and field in TRAINER_FLAGS and not (field.startswith("activation") and job.strategy.startswith("fsdp")):
        return "train args", TRAINER_FLAGS[field]
    if job.strategy == "zero" and field in DEEPSPEED_KEYS:
        return _deepspeed_file(job), DEEPSPEED_KEYS[field]
    if job.strategy.startswith("fsdp") and field in FSDP_KEYS and job.launch.config_file:
        return job.launch.config_file, FSDP_KEYS[field]
    if field == "activation_checkpointing.enabled" and job.model.config is None:
        return job.launch.script or "the training script", "checkpoint_wrapper round each wrapped layer"
    return job.launch.script or "the training script", SCRIPT.get(field, field)


def _deepspeed_file(job: JobSpec) -> str:
    """The DeepSpeed JSON: some other of its keys knows its name."""
    for field in ("zero.stage", "zero.reduce_bucket_size", "zero.dtype", "zero.offload_optimizer"):
        source = job.origin(field).source
        if source.endswith(".json"):
            return source
    return "DeepSpeed config"
