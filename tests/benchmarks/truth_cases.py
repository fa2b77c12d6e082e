"""Measured cases (schema: tests/measured/SCHEMA.md) as jobs: nothing is fitted, every field of a case says what it says.

A case that launchguard does not model raises NotRun with the reason; the score counts it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launchguard.job import (
    ActivationCheckpointing, DdpSpec, FsdpSpec, JobSpec, LaunchSpec, LoraSpec, ModelSpec, Note, OptimizerSpec, Precision, QuantizationSpec, ZeroSpec,
)  # fmt: skip
from launchguard.profiles import DeviceProfile, device
from launchguard.units import GIB

Case = dict[str, Any]

# gpu names of the schema -> device ids, by nominal size where one name covers several cards
DEVICES: dict[str, dict[int, str]] = {
    "A100": {40: "a100-40-sxm", 80: "a100-80-sxm"}, "A100-SXM4": {40: "a100-40-sxm", 80: "a100-80-sxm"}, "A100-80GB": {0: "a100-80-sxm"}, "A800": {0: "a800-80"},
    "H100": {0: "h100-80-sxm"}, "H100-80GB": {0: "h100-80-sxm"}, "H800": {0: "h800-80"}, "H100 (HBM2e, 96 GB class)": {0: "h100-80-sxm"}, "H200": {0: "h200"},
    "V100-SXM2": {16: "v100-16", 32: "v100-32"}, "V100": {16: "v100-16", 32: "v100-32"}, "V100-32GB": {0: "v100-32"}, "A10G": {0: "a10g"},
    "RTX 3090": {0: "rtx3090"}, "RTX 4080": {0: "rtx4080"}, "RTX 4090": {0: "rtx4090"}, "RTX4090": {0: "rtx4090"}, "RTX A5000": {0: "rtxa5000"},
    "T4": {0: "t4"}, "RTX 4070 Ti SUPER": {0: "rtx4070tis"}, "Titan RTX": {0: "24GB"}, "RTX A6000": {0: "rtxa6000"}, "H20": {0: "h20-96"},
    "B200": {0: "b200"},
}  # fmt: skip
TRAINER_STACKS = ("hf_trainer", "llama-factory", "fms", "ms-swift", "axolotl", "trl")
LOOPS = {
    "trl": "sft",
    "accelerate": "accelerate",
    "hf + deepspeed script": "deepspeed",
    "deepspeed-chat": "deepspeed",
    "arctic_training": "deepspeed",
}


class NotRun(Exception):
    """Why a case cannot be simulated."""


def job_of(case: Case, folder: Path) -> tuple[JobSpec, DeviceProfile]:
    """The job of a case and the card that it ran on. Raises NotRun."""
    _refuse(case)
    profile = device_of(case)
    parallel, hardware = case["parallel"], case["hardware"]
    gpus, nodes = hardware.get("gpus") or 1, hardware.get("nodes") or 1
    loop = _loop(case)
    notes: list[Note] = []
    job = JobSpec(
        launch=LaunchSpec("torchrun", (), ".", "train.py", nnodes=nodes, nproc_per_node=max(1, gpus // nodes)),
        model=_model(case, folder),
        loop=loop,
        strategy=_strategy(case),
        micro_batch_size=case["micro_batch"],
        gradient_accumulation_steps=case["grad_accum"] or 1,
        seq_len=case["seq_len"] or 1,
        max_grad_norm=_clip(case, loop),
        zero_grad_set_to_none=(case.get("inputs") or {}).get("script", {}).get("torch", {}).get("set_to_none", True),
        precision=_precision(case, loop),
        activation_checkpointing=_checkpointing(case, loop),
        optimizer=_optimizer(case),
        zero=_zero(case, loop),
        fsdp=_fsdp(case, loop, parallel),
        ddp=_ddp(case),
        lora=_lora(case),
        quantization=_quantization(case),
        device=profile.id,
        headroom="0%",
        allocator_conf=case.get("allocator") or "",
        versions={"torch": case["versions"]["torch"]} if (case.get("versions") or {}).get("torch", "")[:1].isdigit() else {},
    )
    if case["compile"]:
        notes.append(Note("LG310", "warning", "torch.compile is simulated as eager"))
    if case["loss"] in ("chunked", "fused"):
        notes.append(Note("LG311", "warning", f"a {case['loss']} loss is simulated as full logits"))
    return job.changed({"notes": tuple(notes)}), profile


def _refuse(case: Case) -> None:
    parallel, tags = case["parallel"], set(case["tags"] or ())
    for key in ("tp", "pp", "cp"):
        if (parallel.get(key) or 1) > 1:
            raise NotRun(f"{key} > 1")
    if case["framework"]["name"] == "megatron":
        raise NotRun("megatron")
    for tag in ("float8", "activation_offload", "remote_code"):
        if tag in tags:
            raise NotRun(tag)
    if case["model"].get("factory") or "config" not in case["model"]:
        raise NotRun("model described by dims only")
    if case["activation_checkpointing"] == "selective":
        raise NotRun("selective checkpointing")
    quant = case["method"].get("quant")
    if quant not in (None, "nf4", "fp4", "int8"):
        raise NotRun(f"quantisation {quant}")
    if case["loss"] in ("chunked", "fused"):
        raise NotRun("chunked or fused loss")


def device_of(case: Case) -> DeviceProfile:
    """The card: by name and nominal size, by size alone when no name is stated; a virtual card has what its record says."""
    import dataclasses

    hardware = case["hardware"]
    names = DEVICES.get(hardware["gpu"])
    nominal = round(hardware["nominal_gb"] or 0)
    if names is None:
        profile = device(f"{nominal or 80}GB")
    else:
        profile = device(names.get(nominal) or names[min(names, key=lambda n: abs(n - nominal))])
    virtual = hardware.get("virtual")
    if virtual:
        context = virtual["context_bytes"]
        profile = dataclasses.replace(profile, total_bytes=virtual["total_bytes"], context_bytes=context, context_low=context, context_high=context,
                                      sms=virtual["sms"])  # fmt: skip
    elif hardware.get("usable_gib") or hardware.get("usable_gib_typical"):
        profile = dataclasses.replace(profile, total_bytes=int((hardware.get("usable_gib") or hardware["usable_gib_typical"]) * GIB))
    return profile


def _loop(case: Case) -> str:
    entry = (case.get("inputs") or {}).get("entry")
    if entry:
        return str(entry)
    if case["stack"] in LOOPS:
        return LOOPS[case["stack"]]
    return "trainer" if case["stack"] in TRAINER_STACKS else "torch"


def _model(case: Case, folder: Path) -> ModelSpec:
    model = case["model"]
    config = json.loads((folder / model["config"]).read_text())
    if model.get("vocab_size"):
        config["vocab_size"] = model["vocab_size"]
    if case.get("image_size"):
        config["image_size"] = case["image_size"]
    if case["seq_len"] and config.get("max_position_embeddings", 1 << 60) < case["seq_len"]:
        config["max_position_embeddings"] = case["seq_len"]
    if case["seq_len"] and config.get("n_positions", 1 << 60) < case["seq_len"]:
        config["n_positions"] = case["seq_len"]
    attention = {"flash2": "flash_attention_2", "flash3": "flash_attention_3", "none": None}.get(case["attention"], case["attention"])
    recorded = (case.get("inputs") or {}).get("script", {}).get("attn")
    if case["stack"] == "vgpu":
        attention = recorded  # the recorded script left the choice to the model unless it says so
    return ModelSpec(
        source=model["config"],
        config=config,
        task=model.get("auto_class"),
        attn_implementation=attention,
        use_cache=model.get("use_cache", False),
    )


def _strategy(case: Case) -> str:
    name, gpus = case["framework"]["name"], case["hardware"].get("gpus") or 1
    if name == "ddp" and gpus == 1:
        return "single"
    return str(name)


def _clip(case: Case, loop: str) -> float | None:
    script = (case.get("inputs") or {}).get("script", {})
    if script.get("clip") or script.get("torch", {}).get("clip"):
        return 1.0
    return 1.0 if loop in ("trainer", "sft", "deepspeed") else None


def _precision(case: Case, loop: str) -> Precision:
    p = case["precision"]
    params, compute = p["params"], p["compute"]
    if case["method"]["type"] != "full":
        params = case["method"].get("frozen_dtype") or params
    if p["via"] == "autocast":
        accelerated = loop in ("trainer", "sft", "accelerate")
        return Precision(load=params, storage=params, compute=params, autocast=compute, float32_outputs=accelerated)
    if p["via"] == "fsdp_mixed":
        fsdp1 = case["framework"]["name"] == "fsdp1"
        accelerated = loop in ("trainer", "sft", "accelerate")
        return Precision(load=params, storage=p["params"], compute=compute, reduce=p["reduce"] or compute,
                         autocast=compute if fsdp1 and accelerated else None, float32_outputs=fsdp1 and accelerated)  # fmt: skip
    if p["via"].startswith("deepspeed"):
        load = params if case["stack"] != "vgpu" else "float32"
        return Precision(load=load, storage=compute, compute=compute)
    return Precision(load=params, storage=params, compute=params, reduce=p["reduce"] or params)


def _checkpointing(case: Case, loop: str) -> ActivationCheckpointing:
    if case["activation_checkpointing"] != "full":
        return ActivationCheckpointing()
    accelerate = ((case.get("inputs") or {}).get("accelerate_config") or {}).get("fsdp_config", {})
    via = "fsdp" if accelerate.get("fsdp_activation_checkpointing") else "model"
    return ActivationCheckpointing(
        True, via=via, use_reentrant="reentrant," in f"{case['activation_checkpointing_detail']},".replace("non-reentrant", "")
    )


def _optimizer(case: Case) -> OptimizerSpec:
    o = case["optimizer"]
    name, impl, bits = o["name"], o["impl"], o.get("state_bits")
    if impl == "in_backward" or impl == "4bit":
        raise NotRun(f"optimizer {impl}")
    if impl == "8bit":
        name = f"{name}_8bit" if o.get("library") != "torchao" else "adamw_torch_8bit"
        return OptimizerSpec(name.replace("adam_8bit", "adamw_8bit"), "foreach")
    if impl == "paged":
        return OptimizerSpec(f"paged_{name}_{bits or 32}bit", "foreach")
    if impl == "cpu":
        return OptimizerSpec(name, "cpu")
    if o.get("library") == "deepspeed":
        return OptimizerSpec(name, "deepspeed_fused")
    return OptimizerSpec(name, impl)


def _zero(case: Case, loop: str) -> ZeroSpec | None:
    framework = case["framework"]
    if framework["name"] != "zero":
        return None
    recorded = (case.get("inputs") or {}).get("ds_config")
    ds = recorded or {**(framework.get("raw") or {})}
    zero = {**(ds.get("zero_optimization") or ds)}
    stage = framework["zero_stage"]
    values: dict[str, Any] = {k: v for k, v in zero.items() if k in ZeroSpec.__dataclass_fields__ and isinstance(v, (bool, int, float))}
    for key in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
                "stage3_max_reuse_distance", "stage3_param_persistence_threshold"):  # fmt: skip
        if key in values:
            values[key] = int(values[key])
    if loop == "trainer":  # "auto" values as the Trainer fills them
        values = {**_auto(case, zero, stage), **values}
    values.setdefault("overlap_comm", stage == 3)
    accum = (ds.get("data_types") or {}).get("grad_accum_dtype")
    return ZeroSpec(**{**values, "stage": stage, "dtype": case["precision"]["compute"], "grad_accum_dtype": accum and {"fp32": "float32"}.get(accum, accum),
                       "offload_optimizer": framework["offload_optimizer"] or "none", "offload_param": framework["offload_param"] or "none",
                       "zero_init": stage == 3 and loop in ("trainer", "sft")})  # fmt: skip


def _auto(case: Case, zero: dict[str, Any], stage: int) -> dict[str, int]:
    config = case["model"].get("_config") or {}
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model")
    if not hidden:
        return {}
    filled = {"reduce_bucket_size": hidden * hidden}
    if stage == 3:
        filled |= {"stage3_prefetch_bucket_size": int(0.9 * hidden * hidden), "stage3_param_persistence_threshold": 10 * hidden}
    return {k: v for k, v in filled.items() if zero.get(k, "auto") == "auto"}


def _fsdp(case: Case, loop: str, parallel: dict[str, Any]) -> FsdpSpec | None:
    framework = case["framework"]
    if framework["name"] not in ("fsdp1", "fsdp2"):
        return None
    version = int(framework["name"][-1])
    inputs = case.get("inputs") or {}
    own = (inputs.get("accelerate_config") or {}).get("fsdp_config", {})
    torch_args = inputs.get("script", {}).get("torch", {})
    accelerated = loop in ("trainer", "sft", "accelerate")
    reshard = framework["reshard_after_forward"]
    group = None
    if (parallel.get("dp_replicate") or 1) > 1:
        group = parallel["dp_shard"]
    return FsdpSpec(
        version=version,
        sharding_strategy=framework["sharding_strategy"] or "FULL_SHARD",
        reshard_after_forward=True if reshard in (None, "except_last_block") else reshard,
        wrap_policy="TRANSFORMER_BASED_WRAP",
        use_orig_params=own.get("fsdp_use_orig_params", torch_args.get("use_orig_params", True)),
        backward_prefetch=own.get("fsdp_backward_prefetch") if accelerated else torch_args.get("backward_prefetch", "BACKWARD_PRE"),
        forward_prefetch=bool(own.get("fsdp_forward_prefetch", torch_args.get("forward_prefetch", False))),
        offload_params=bool(framework["offload_param"] and framework["offload_param"] != "none"),
        cpu_ram_efficient_loading=bool(own.get("fsdp_cpu_ram_efficient_loading", False)),
        accelerate_grouping=version == 2 and accelerated,
        sync_module_states=version == 1 and loop == "trainer",
        shard_group_size=group,
    )


def _ddp(case: Case) -> DdpSpec | None:
    if case["framework"]["name"] != "ddp":
        return None
    torch_args = (case.get("inputs") or {}).get("script", {}).get("torch", {})
    trainer = _loop(case) in ("trainer", "sft")  # the Trainer asks for unused parameters unless it checkpoints
    find_unused = torch_args.get("find_unused_parameters", trainer and case["activation_checkpointing"] == "none")
    return DdpSpec(
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=torch_args.get("gradient_as_bucket_view", False),
        static_graph=torch_args.get("static_graph", False),
    )


def _lora(case: Case) -> LoraSpec | None:
    m = case["method"]
    if m["type"] == "full":
        return None
    targets = m["targets"]
    if isinstance(targets, list):
        names = [t for t in targets if t.isidentifier()]
        if len(names) != len(targets):
            raise NotRun("LoRA targets described in words")
        targets = tuple(names)
    return LoraSpec(r=m.get("r") or m.get("rank"), lora_alpha=m.get("alpha") or 16, target_modules=targets,
                    use_dora=m["type"] == "dora", autocast_adapter_dtype=m.get("adapter_dtype") == "float32")  # fmt: skip


def _quantization(case: Case) -> QuantizationSpec | None:
    m = case["method"]
    if not m.get("quant"):
        return None
    return QuantizationSpec(m["quant"], double_quant=bool(m.get("double_quant")), compute_dtype=case["precision"]["compute"],
                            prepare_kbit=m.get("frozen_dtype") == "float32" or case["stack"] == "vgpu")  # fmt: skip


def attach_config(case: Case, folder: Path) -> Case:
    """The case with its model's config at hand (for rules that need the hidden size)."""
    path = case["model"].get("config")
    if path:
        case["model"]["_config"] = json.loads((folder / path).read_text())
    return case
