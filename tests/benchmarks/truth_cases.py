"""Measured cases (schema: tests/measured/SCHEMA.md) as jobs: nothing is fitted, every field of a case says what it says.

A case that launchguard does not model raises NotRun with the reason; the score counts it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truth_models import MEGATRON_STACKS, TRAINER_STACKS, NotRun, adapters_apart, checkpoint_of, is_litgpt, lora_targets, model_of

from launchguard.errors import InputError
from launchguard.installed import release
from launchguard.job import (
    ActivationCheckpointing,
    DdpSpec,
    EvaluationSpec,
    FsdpSpec,
    JobSpec,
    LaunchSpec,
    LoraSpec,
    Note,
    OptimizerSpec,
    Precision,
    QuantizationSpec,
    ZeroSpec,
)  # fmt: skip
from launchguard.profiles import DeviceProfile, device
from launchguard.units import GIB

__all__ = ["Case", "NotRun", "attach_config", "job_of"]
Case = dict[str, Any]


@dataclass(frozen=True)
class StoredQuantization(QuantizationSpec):
    """quant_storage: dtype that packed weights are viewed in (bitsandbytes bnb_4bit_quant_storage; decides how FSDP flattens them)."""

    quant_storage: str = "uint8"


# gpu names of the schema -> device ids, by nominal size where one name covers several cards
DEVICES: dict[str, dict[int, str]] = {
    "A100": {40: "a100-40-sxm", 80: "a100-80-sxm"}, "A100-SXM4": {40: "a100-40-sxm", 80: "a100-80-sxm"}, "A100-80GB": {0: "a100-80-sxm"},
    "A800": {0: "a800-80"}, "H100": {0: "h100-80-sxm"}, "H100-80GB": {0: "h100-80-sxm"}, "H800": {0: "h800-80"}, "H200": {0: "h200"},
    "H100 (HBM2e, 96 GB class)": {0: "h100-80-sxm"}, "V100-SXM2": {16: "v100-16", 32: "v100-32"}, "V100": {16: "v100-16", 32: "v100-32"},
    "V100-32GB": {0: "v100-32"}, "A10G": {0: "a10g"}, "RTX 3090": {0: "rtx3090"}, "RTX 4080": {0: "rtx4080"}, "RTX 4090": {0: "rtx4090"},
    "RTX4090": {0: "rtx4090"}, "RTX A5000": {0: "rtxa5000"}, "T4": {0: "t4"}, "RTX 4070 Ti SUPER": {0: "rtx4070tis"},
    "Titan RTX": {0: "24GB"}, "RTX A6000": {0: "rtxa6000"}, "H20": {0: "h20-96"}, "B200": {0: "b200"},
}  # fmt: skip
# hand-written loops of the form "outputs = model(**batch); outputs.loss.backward()": what they state after backward includes the logits
# (prime-rl's train.py of 2026-01 deletes its logits and keeps the dictionary that holds them, cast to float32)
KEEPS_OUTPUTS = ("hf + peft script", "fsdp_qlora script", "prime-rl", "custom script")
# litgpt's pyproject.toml, March to December 2024; fsdp_qlora's README of March 2024 (bitsandbytes>=0.43.0, the newest, and no transformers
# 4.38 or 4.39, the newest but one)
PINNED = {
    "litgpt": {"bitsandbytes": "0.42.0"},
    "fsdp_qlora script": {"bitsandbytes": "0.43.0", "transformers": "4.37.2"},
    "hf script of 2020": {"torch": "1.4.0"},  # what was current in the year that the stack is called by
}
# lora_dropout where the program's default decides: litgpt's is in its model (tests/measured/litgpt_model.py)
DROPOUT = {"fsdp_qlora script": 0.1, "ms-swift": 0.05}
LOOPS = {
    "accelerate": "accelerate",
    "hf + deepspeed script": "deepspeed",
    "deepspeed-chat": "deepspeed",
    "arctic_training": "deepspeed",
}


def job_of(case: Case, folder: Path) -> tuple[JobSpec, DeviceProfile]:
    """The job of a case and the card that it ran on. Raises NotRun."""
    _refuse(case)
    profile, loop = device_of(case), _loop(case)
    notes = _notes(case)
    precision = _precision(case, loop)
    job = JobSpec(
        launch=_launch(case),
        model=model_of(case, folder, precision.load, notes),
        loop=loop,
        strategy=_strategy(case),
        micro_batch_size=case["micro_batch"],
        gradient_accumulation_steps=case["grad_accum"] or 1,
        seq_len=case["seq_len"] or 1,
        max_grad_norm=_clip(case, loop),
        outputs_alive_in_backward=case["stack"] in KEEPS_OUTPUTS or is_litgpt(case),
        outputs_deleted=case["stack"] == "fsdp_qlora script",  # train.py: output = None, loss = None
        zero_grad_set_to_none=(case.get("inputs") or {}).get("script", {}).get("torch", {}).get("set_to_none", not _before_torch_2(case)),
        precision=precision,
        activation_checkpointing=_checkpointing(case),
        optimizer=_optimizer(case),
        zero=_zero(case, loop),
        fsdp=_fsdp(case, loop),
        ddp=_ddp(case),
        lora=_lora(case, notes),
        quantization=_quantization(case),
        evaluation=_evaluation(case),
        device=profile.id,
        headroom="0%",
        allocator_conf=case.get("allocator") or "",
        versions=_versions(case),
    )
    return job.changed({"notes": tuple(notes)}), profile


def _stated(case: Case) -> dict[str, Any]:
    return {**PINNED.get(case["stack"], {}), **(case.get("versions") or {})}


def _versions(case: Case) -> dict[str, str]:
    """Libraries whose version decides which rule is used, where the case states them, or what its program asked for when it was measured
    (PINNED)."""
    stated = _stated(case)
    return {name: str(stated[name]) for name in ("torch", "transformers", "bitsandbytes") if str(stated.get(name))[:1].isdigit()}


def _before_torch_2(case: Case) -> bool:
    """zero_grad() fills gradients with zeros, so that they stay (set_to_none is its default since torch 2.0, March 2023). Where torch is
    not stated, a transformers older than that tells."""
    versions = _stated(case)
    stated = [(str(versions[name]), first) for name, first in (("torch", (2, 0)), ("transformers", (4, 27))) if name in versions]
    return bool(stated) and stated[0][0][:1].isdigit() and release(stated[0][0].split()[0]) < stated[0][1]


def _refuse(case: Case) -> None:
    """What no strategy of launchguard simulates."""
    parallel = case["parallel"]
    if (parallel.get("pp") or 1) > 1:
        raise NotRun("pipeline parallelism")
    if case["framework"]["name"] == "megatron":
        raise NotRun("Megatron's optimizer and gradient buffers")
    if not isinstance(case.get("micro_batch"), int):
        raise NotRun("micro-batch not stated")


def _notes(case: Case) -> list[Note]:
    """What is simulated otherwise than it ran (LG3xx: not modelled), and what the case assumes (LG21x)."""
    tags, parallel = set(case["tags"] or ()), case["parallel"]
    told = [
        ("LG310", case["compile"], "torch.compile is simulated as eager"),
        ("LG314", "float8" in tags or case["precision"].get("float8"), "float8 products are simulated in the compute dtype"),
        ("LG315", (parallel.get("cp") or 1) > 1, "context parallelism is simulated as this rank's part of the sequence alone"),
        ("LG316", (parallel.get("ep") or 1) > 1, "expert parallelism is simulated as sharding"),
        ("LG318", (case["method"].get("adapters_allocated") or 1) > 1, "adapters beyond the trained one are left out"),
        ("LG319", "moe" in tags and case["method"]["type"] == "full" and case["stack"] in ("prime-rl", "torchtitan"),
         "grouped expert kernels are simulated as transformers runs experts"),
        ("LG210", "doubtful" in tags or "remote_code" in tags, "the source of the case is doubtful, or its model code is not public"),
    ]  # fmt: skip
    notes = [Note(code, "warning", message) for code, applies, message in told if applies]
    if case["stack"] != "vgpu":  # none of the published runs has the versions that the rules were read in
        notes.append(Note("LG330", "info", "other versions of the libraries ran than those that the rules were read in"))
    return notes


def _launch(case: Case) -> LaunchSpec:
    """The ranks among which states can be sharded: tensor-parallel ranks stand for one."""
    hardware = case["hardware"]
    gpus, nodes = hardware.get("gpus") or 1, hardware.get("nodes") or 1
    ranks = max(1, gpus // (case["parallel"].get("tp") or 1))
    local = max(1, ranks // nodes)
    return LaunchSpec("torchrun", (), ".", "train.py", nnodes=ranks // local, nproc_per_node=local)


def device_of(case: Case) -> DeviceProfile:
    """The card: by name and nominal size, by size alone when no name is stated; a virtual card has what its record says."""
    hardware = case["hardware"]
    profile = _card(str(hardware["gpu"]), round(hardware["nominal_gb"] or 0))
    virtual, usable = hardware.get("virtual"), hardware.get("usable_gib") or hardware.get("usable_gib_typical")
    if virtual:
        context = virtual["context_bytes"]
        return dataclasses.replace(
            profile,
            total_bytes=virtual["total_bytes"],
            context_bytes=context,
            context_low=context,
            context_high=context,
            sms=virtual["sms"],
        )
    if usable:
        profile = dataclasses.replace(profile, total_bytes=int(usable * GIB))
    return _with_every_kernel(profile) if _cuda_before_11_7(case) else profile


# A context with every kernel loaded at its start, as before CUDA 11.7, beside one that loads them when they are used: "more than 1000 MB"
# and "about 300 MB" (maintainer, pytorch/pytorch issue 107667).
EAGER_KERNELS = 700_000_000


def _with_every_kernel(profile: DeviceProfile) -> DeviceProfile:
    low, used, high = profile.context_low, profile.context_bytes, profile.context_high
    return dataclasses.replace(profile, context_low=low, context_bytes=used + EAGER_KERNELS, context_high=high + EAGER_KERNELS)


def _cuda_before_11_7(case: Case) -> bool:
    """As stated. torch's wheels have it since 1.13 (October 2022)."""
    versions = _stated(case)
    cuda, torch = str(versions.get("cuda") or ""), str(versions.get("torch") or "")
    if cuda[:1].isdigit():
        return release(cuda) < (11, 7)
    return torch[:1].isdigit() and release(torch) < (1, 13)


def _card(name: str, nominal: int) -> DeviceProfile:
    names = DEVICES.get(name)
    if names is not None:
        return device(names.get(nominal) or names[min(names, key=lambda n: abs(n - nominal))])
    for spelling in (name, f"{name}-{nominal}GB", f"{name}-{nominal}"):
        try:
            return device(spelling)
        except InputError:
            continue
    return device(f"{nominal or 80}GB")


def _loop(case: Case) -> str:
    entry = (case.get("inputs") or {}).get("entry")
    if entry:
        return str(entry)
    if case["stack"] in LOOPS:
        return LOOPS[case["stack"]]
    return "trainer" if case["stack"] in TRAINER_STACKS else "torch"


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
    if case["method"].get("quant") and params == "float32":
        params = compute  # what is left unquantised is float32 only after prepare_model_for_kbit_training
    if p["via"] == "autocast":
        accelerated = loop in ("trainer", "sft", "accelerate")
        return Precision(load=params, storage=params, compute=params, autocast=compute, float32_outputs=accelerated)
    if p["via"] == "fsdp_mixed":
        fsdp1 = case["framework"]["name"] == "fsdp1"
        accelerated = loop in ("trainer", "sft", "accelerate")
        return Precision(load=params, storage=p["params"], compute=compute, reduce=p["reduce"] or compute,
                         autocast=compute if fsdp1 and accelerated else None,
                         float32_outputs=(fsdp1 and accelerated) or case["stack"] == "prime-rl")  # fmt: skip
    if p["via"].startswith("deepspeed"):
        load = params if case["stack"] != "vgpu" else "float32"
        return Precision(load=load, storage=compute, compute=compute)
    return Precision(load=params, storage=params, compute=params, reduce=p["reduce"] or params)


def _evaluation(case: Case) -> EvaluationSpec | None:
    """Recorded runs that evaluate do so without compute_metrics: of every batch the loss alone is kept."""
    arguments = (case.get("inputs") or {}).get("training_arguments") or {}
    if str(arguments.get("eval_strategy", "no")) == "no":
        return None
    return EvaluationSpec(batch_size=int(arguments.get("per_device_eval_batch_size", 8)))


def _checkpointing(case: Case) -> ActivationCheckpointing:
    tensor_parallel = (case["parallel"].get("tp") or 1) > 1 and case["stack"] in MEGATRON_STACKS
    if case["activation_checkpointing"] != "full" or checkpoint_of(case) is not None or tensor_parallel:
        return ActivationCheckpointing()
    if case["stack"] == "fsdp_qlora script":  # train.py: apply_activation_checkpointing on decoder layers, once they are wrapped
        return ActivationCheckpointing(True, via="fsdp", use_reentrant=True, classes=_wrap_classes(case)[:1])
    accelerate = ((case.get("inputs") or {}).get("accelerate_config") or {}).get("fsdp_config", {})
    via = "fsdp" if accelerate.get("fsdp_activation_checkpointing") else "model"
    stated = f"{case['activation_checkpointing_detail']},"
    detail = stated.replace("non-reentrant", "")
    reentrant = "reentrant," in detail or ("non-reentrant" not in stated and _transformers_4(case))
    return ActivationCheckpointing(True, via=via, use_reentrant=reentrant)


def _transformers_4(case: Case) -> bool:
    """Its gradient_checkpointing_enable is reentrant where nobody says otherwise; published runs of the Trainer are older than 5."""
    stated = str((case.get("versions") or {}).get("transformers") or "4")
    return case["stack"] in TRAINER_STACKS and stated[:1] == "4"


def _optimizer(case: Case) -> OptimizerSpec:
    o = case["optimizer"]
    name, impl, bits = o["name"], o["impl"], o.get("state_bits")
    if impl == "in_backward":
        raise NotRun("optimizer step inside backward")
    if impl == "4bit":
        return OptimizerSpec("adamw_torch_4bit", "foreach")
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
    known = ZeroSpec.__dataclass_fields__
    values: dict[str, Any] = {k: v for k, v in zero.items() if k in known and isinstance(v, (bool, int, float))}
    values |= {k: int(v) for k, v in values.items() if known[k].type == "int"}
    if loop == "trainer":  # "auto" values as the Trainer fills them
        values = {**_auto(case, zero, stage), **values}
    values.setdefault("overlap_comm", stage == 3)
    accum = (ds.get("data_types") or {}).get("grad_accum_dtype")
    values |= {
        "stage": stage,
        "dtype": case["precision"]["compute"],
        "grad_accum_dtype": accum and {"fp32": "float32"}.get(accum, accum),
        "offload_optimizer": framework["offload_optimizer"] or "none",
        "offload_param": framework["offload_param"] or "none",
        # HF's from_pretrained under a DeepSpeed config and Megatron-DeepSpeed both build the model sharded (deepspeed.zero.Init)
        "zero_init": stage == 3 and (case["stack"] != "vgpu" or loop in ("trainer", "sft")),
    }
    return ZeroSpec(**values)


def _auto(case: Case, zero: dict[str, Any], stage: int) -> dict[str, int]:
    config = case["model"].get("_config") or {}
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model")
    if not hidden:
        return {}
    filled = {"reduce_bucket_size": hidden * hidden}
    if stage == 3:
        filled |= {"stage3_prefetch_bucket_size": int(0.9 * hidden * hidden), "stage3_param_persistence_threshold": 10 * hidden}
    return {k: v for k, v in filled.items() if zero.get(k, "auto") == "auto"}


def _fsdp(case: Case, loop: str) -> FsdpSpec | None:
    framework, parallel = case["framework"], case["parallel"]
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
        group = parallel["dp_shard"] * (parallel.get("cp") or 1)
    return FsdpSpec(
        version=version,
        sharding_strategy=framework["sharding_strategy"] or "FULL_SHARD",
        reshard_after_forward=True if reshard in (None, "except_last_block") else reshard,
        wrap_policy="TRANSFORMER_BASED_WRAP",
        wrap_classes=_wrap_classes(case),
        use_orig_params=own.get(
            "fsdp_use_orig_params", torch_args.get("use_orig_params", (framework.get("raw") or {}).get("use_orig_params", True))
        ),
        backward_prefetch=own.get("fsdp_backward_prefetch") if accelerated else torch_args.get("backward_prefetch", "BACKWARD_PRE"),
        forward_prefetch=bool(own.get("fsdp_forward_prefetch", torch_args.get("forward_prefetch", False))),
        offload_params=bool(framework["offload_param"] and framework["offload_param"] != "none"),
        cpu_ram_efficient_loading=bool(own.get("fsdp_cpu_ram_efficient_loading", False)),
        accelerate_grouping=version == 2 and accelerated,
        sync_module_states=version == 1 and loop == "trainer",
        shard_group_size=group,
        sync_each_batch=_syncs_each_batch(case, version, accelerated),
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


def _syncs_each_batch(case: Case, version: int, accelerated: bool) -> bool:
    """Gradients are reduced after every micro-batch unless the loop asks otherwise. Lightning does (no_backward_sync); Accelerate does for
    FSDP1, and for FSDP2 since its pull request 3762 of September 2025 (1.11): a case that states no version is older."""
    if case["stack"] == "vgpu":
        return False
    if case["stack"].startswith(("litgpt", "lightning")):
        return False
    stated = str((case.get("versions") or {}).get("accelerate") or "0.0").split(".")
    recent = tuple(int(part) for part in stated[:2] if part.isdigit()) >= (1, 11)
    return not accelerated or (version == 2 and not recent)


def _wrap_classes(case: Case) -> tuple[str, ...]:
    """Class names where the case gives some; (): the model's own layers."""
    wrap = str(case["framework"].get("wrap") or "")
    if adapters_apart(case):
        family = (case["model"].get("_config") or {}).get("model_type", "")
        return ("".join(part.capitalize() for part in family.split("_")) + "DecoderLayer", "Linear")
    names = tuple(n.strip() for n in wrap.split(","))
    return names if all(n.isidentifier() and n[0].isupper() for n in names) else ()


def _lora(case: Case, notes: list[Note]) -> LoraSpec | None:
    m = case["method"]
    if m["type"] == "full" or is_litgpt(case):
        return None
    return LoraSpec(
        r=m.get("r") or m.get("rank"),
        lora_alpha=m.get("alpha") or 16,
        lora_dropout=m.get("dropout") or DROPOUT.get(case["stack"], 0.0),
        target_modules=lora_targets(m["targets"], notes),
        use_dora=m["type"] == "dora",
        autocast_adapter_dtype=m.get("adapter_dtype") == "float32",
    )


def _quantization(case: Case) -> QuantizationSpec | None:
    """Under FSDP packed weights must look like the others (bitsandbytes' storage dtype)."""
    m = case["method"]
    if not m.get("quant"):
        return None
    sharded = case["framework"]["name"] in ("fsdp1", "fsdp2")
    storage = m.get("quant_storage") or (m.get("frozen_dtype") if sharded else None) or "uint8"
    return StoredQuantization(
        m["quant"],
        double_quant=bool(m.get("double_quant")),
        compute_dtype=case["precision"]["compute"],
        prepare_kbit=m.get("frozen_dtype") == "float32" or case["stack"] == "vgpu" or _trl_casts(case),
        trl_casts=_trl_casts(case),
        quant_storage=storage,
    )


def _trl_casts(case: Case) -> bool:
    """The SFTTrainer of a stated TRL before 0.27 prepares a 4-bit model that is not sharded and casts its norms, unless a plug-in of
    fms-acceleration installs the adapters (plugins/accelerated-peft framework_plugin_bnb.py; its baseline leaves that to TRL)."""
    scenario = str((case["framework"].get("raw") or {}).get("acceleration_config") or "")
    known = "0.13.0" if scenario == "baseline-peft-bnb" else None  # every row of the benchmark's tables has TRL 0.11 to 0.13
    version, gpus = (case.get("versions") or {}).get("trl") or known, case["hardware"].get("gpus") or 1
    if version is None or gpus > 1 or case["method"].get("quant") not in ("nf4", "fp4"):
        return False
    return release(str(version)) < (0, 27) and not scenario.startswith("accelerated-peft")


def attach_config(case: Case, folder: Path) -> Case:
    """The case with its model's config at hand (for rules that need the hidden size)."""
    path = case["model"].get("config")
    if path:
        case["model"]["_config"] = json.loads((folder / path).read_text())
    return case
