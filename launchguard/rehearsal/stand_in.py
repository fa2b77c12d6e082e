"""A job without its script: the spec of inside/synthetic_job.py that does what the configuration says, and the launch that runs it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launchguard.errors import InputError, Unpredictable
from launchguard.job import TRAINER_LOOPS, JobSpec, LaunchSpec
from launchguard.profiles import optimizer

SCRIPT = Path(__file__).parent / "inside" / "synthetic_job.py"
LOOPS = (*TRAINER_LOOPS, "accelerate", "deepspeed", "torch")


def stand_in(job: JobSpec, steps: int, folder: Path) -> LaunchSpec:
    """The job's launch with the stand-in script; its spec is written to `folder`. Raises Unpredictable for what it cannot stand in for."""
    path = folder / "spec.json"
    path.write_text(json.dumps(spec_of(job, steps), default=list))
    return dataclasses.replace(job.launch, script=str(SCRIPT), script_args=(str(path), *job.launch.script_args), is_module=False)


def spec_of(job: JobSpec, steps: int) -> dict[str, Any]:
    if job.loop not in LOOPS:
        raise Unpredictable(f"a {job.loop} loop has no stand-in", help="rehearse the script itself: launchguard rehearse -- ...")
    spec: dict[str, Any] = {
        "loop": job.loop, "model": _model(job), "dtype": job.precision.load, "micro_batch_size": job.micro_batch_size,
        "seq_len": job.seq_len,
        "gradient_accumulation_steps": job.gradient_accumulation_steps, "steps": steps, "max_grad_norm": job.max_grad_norm,
        "zero_grad_set_to_none": job.zero_grad_set_to_none, "lora": _lora(job),
        "quantization": dataclasses.asdict(job.quantization) if job.quantization else None,
    }  # fmt: skip
    checkpointing = job.activation_checkpointing
    if checkpointing.enabled and checkpointing.via == "model" and job.loop not in TRAINER_LOOPS:
        spec["checkpointing"] = {"use_reentrant": checkpointing.use_reentrant}
    if job.loop in TRAINER_LOOPS:
        spec["training_arguments"] = _training_arguments(job)
        if not (_in_deepspeed_json(job) or job.origin("optimizer.name").key == "--optim"):  # which the Trainer reads for itself
            spec["optimizer"] = optimizer_of(job)
    else:
        spec |= _own_loop(job)
    return spec


def _model(job: JobSpec) -> dict[str, Any]:
    model = job.model
    described = {"task": model.task, "attn_implementation": model.attn_implementation, "use_cache": model.use_cache, "loss": model.loss}
    if model.config is not None:
        return {**described, "config": dict(model.config)}
    inputs = {name: dataclasses.asdict(tensor) for name, tensor in model.inputs.items()}
    path = str(Path(job.launch.cwd, model.python_path))
    return {**described, "factory": model.source, "kwargs": dict(model.kwargs), "inputs": inputs, "python_path": path}


def _lora(job: JobSpec) -> dict[str, Any] | None:
    if job.lora is None:
        return None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(job.lora).items() if v not in ((), None)}


def _training_arguments(job: JobSpec) -> dict[str, Any]:
    """What the command line need not say again: the batch, as launchguard's own options may have changed it, and the job's switches."""
    half = job.precision.autocast or (job.zero.dtype if job.zero else None)
    given: dict[str, Any] = {
        "per_device_train_batch_size": job.micro_batch_size, "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "bf16": half == "bfloat16", "fp16": half == "float16", "gradient_checkpointing": job.activation_checkpointing.enabled,
    }  # fmt: skip
    if job.activation_checkpointing.enabled:
        given["gradient_checkpointing_kwargs"] = {"use_reentrant": job.activation_checkpointing.use_reentrant}
    if job.max_grad_norm is not None:
        given["max_grad_norm"] = job.max_grad_norm
    if job.loop in ("sft", "dpo"):
        given["max_length"] = job.seq_len
    return given


def _own_loop(job: JobSpec) -> dict[str, Any]:
    """An accelerate, DeepSpeed or plain loop, which builds its own optimizer and wraps its own model."""
    in_json = _in_deepspeed_json(job)
    spec: dict[str, Any] = {"optimizer": None if job.loop == "deepspeed" and in_json else optimizer_of(job)}
    if job.loop == "accelerate":
        spec["ds_dummy_optimizer"] = job.strategy == "zero" and in_json
        spec["accelerator"] = {"gradient_accumulation_steps": job.gradient_accumulation_steps}
    elif job.loop == "deepspeed":
        spec |= {
            "ds_config": str(Path(job.launch.cwd, job.origin("zero.stage").source)),
            "zero_init": bool(job.zero and job.zero.zero_init),
        }
    else:
        spec |= {"autocast": job.precision.autocast, "grad_scaler": job.precision.autocast == "float16"}
        if job.strategy != "single":
            spec |= {"wrap": job.strategy, "wrap_options": _wrap_options(job)}
    return spec


def _in_deepspeed_json(job: JobSpec) -> bool:
    """Does DeepSpeed build the optimizer from its own configuration?"""
    return job.origin("optimizer.name").key == "optimizer.type"


def optimizer_of(job: JobSpec) -> dict[str, Any]:
    """What the stand-in builds: names under which transformers may know it, else the class itself."""
    try:
        return described_optimizer(job.optimizer.name, job.optimizer.implementation, job.optimizer.params)
    except InputError as e:
        raise Unpredictable(e.message, where=str(job.origin("optimizer.name")),
                            help="rehearse the script itself: launchguard rehearse -- ...") from None  # fmt: skip


def described_optimizer(name: str, implementation: str, params: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    profile = optimizer(name)
    return {"names": [profile.name, *profile.aliases], "class": profile.torch_class, "implementation": implementation,
            "params": dict(params)}  # fmt: skip


def _wrap_options(job: JobSpec) -> Mapping[str, Any]:
    if job.ddp is not None and job.strategy == "ddp":
        return {"gradient_as_bucket_view": job.ddp.gradient_as_bucket_view, "static_graph": job.ddp.static_graph,
                "find_unused_parameters": job.ddp.find_unused_parameters}  # fmt: skip
    if job.fsdp is None or job.strategy not in ("fsdp1", "fsdp2"):
        return {}
    fsdp, precision = job.fsdp, job.precision
    mixed = precision.compute if precision.compute != precision.storage else None
    options: dict[str, Any] = {"wrap_classes": list(fsdp.wrap_classes), "cpu_offload": fsdp.offload_params, "param_dtype": mixed,
                               "reduce_dtype": precision.reduce}  # fmt: skip
    if job.strategy == "fsdp2":
        return {**options, "reshard_after_forward": fsdp.reshard_after_forward}
    return {**options, "sharding_strategy": fsdp.sharding_strategy, "use_orig_params": fsdp.use_orig_params,
            "backward_prefetch": fsdp.backward_prefetch, "forward_prefetch": fsdp.forward_prefetch,
            "limit_all_gathers": fsdp.limit_all_gathers}  # fmt: skip
