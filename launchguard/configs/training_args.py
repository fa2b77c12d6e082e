"""TrainingArguments, SFTConfig and DPOConfig names, and their common relatives in hand-written loops, as fields of the job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from launchguard.configs import evaluation, model_config, precision, saving
from launchguard.configs._installed import default_of
from launchguard.configs._sources import TRL_LOOPS, Sources, positive
from launchguard.errors import InputError
from launchguard.installed import version_of
from launchguard.job import Origin, Setting

BATCH_NAMES = ("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size",
               "per_device_batch_size", "train_batch_size", "batch_size")  # fmt: skip
SEQ_NAMES = ("max_seq_length", "max_seq_len", "max_length", "block_size", "cutoff_len", "model_max_length", "sequence_length",
             "sequence_len", "seq_length", "seq_len", "max_source_length", "context_length")  # fmt: skip
DTYPE_NAMES = ("torch_dtype", "dtype", "model_dtype")
MODEL_NAMES = ("model_name_or_path", "model_name", "model", "base_model", "model_path", "model_id", "config_name")

# --optim -> (key of profiles/optimizers, implementation). transformers 5.24 trainer_optimizer.py; a name that is not here is its own key.
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw_torch": ("adamw", "foreach"), "adamw_torch_fused": ("adamw", "fused"), "adamw_torch_xla": ("adamw", "fused"),
    "adamw_torch_npu_fused": ("adamw", "fused"), "adamw_hf": ("adamw", "for_loop"), "sgd": ("sgd", "foreach"),
    "adagrad": ("adagrad", "foreach"), "rmsprop": ("rmsprop", "foreach"), "adafactor": ("adafactor", "for_loop"),
    "adamw_bnb_8bit": ("adamw_8bit", "fused"), "adamw_8bit": ("adamw_8bit", "fused"), "paged_adamw_8bit": ("paged_adamw_8bit", "fused"),
    "paged_adamw_32bit": ("paged_adamw_32bit", "fused"), "paged_adamw": ("paged_adamw_32bit", "fused"),
    "lion_32bit": ("lion", "fused"), "lion_8bit": ("lion_8bit", "fused"), "paged_lion_32bit": ("paged_lion_32bit", "fused"),
    "paged_lion_8bit": ("paged_lion_8bit", "fused"), "ademamix": ("ademamix", "fused"), "ademamix_8bit": ("ademamix_8bit", "fused"),
    "rmsprop_bnb": ("rmsprop_bnb", "fused"), "rmsprop_bnb_8bit": ("rmsprop_bnb_8bit", "fused"),
    "rmsprop_bnb_32bit": ("rmsprop_bnb", "fused"),
}  # fmt: skip
# Classes of a hand-written loop that are not torch's: bitsandbytes 0.49 optim, transformers, deepspeed 0.19.8 ops -> as OPTIMIZERS.
_OTHER_CLASSES: Mapping[str, tuple[str, str]] = {
    "AdamW8bit": ("adamw_8bit", "fused"), "Adam8bit": ("adamw_8bit", "fused"), "PagedAdamW8bit": ("paged_adamw_8bit", "fused"),
    "PagedAdam8bit": ("paged_adamw_8bit", "fused"), "PagedAdamW32bit": ("paged_adamw_32bit", "fused"), "Lion8bit": ("lion_8bit", "fused"),
    "PagedLion8bit": ("paged_lion_8bit", "fused"), "PagedLion32bit": ("paged_lion_32bit", "fused"), "Adafactor": ("adafactor", "for_loop"),
}  # fmt: skip
# Optimizers of the Trainer's list without a profile, whose states are low-rank or one tensor less (their papers): adamw is an upper bound.
_LESS_THAN_ADAMW = ("galore_", "apollo_", "schedule_free_", "stable_adamw")
_MEMORY_PARAMS = ("amsgrad", "momentum", "centered", "rank", "fused", "foreach", "maximize", "block_size")

# Arguments that change memory and are not simulated: name -> (when, what it does).
_NOT_MODELLED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "auto_find_batch_size": (bool, "the batch size shrinks after every out-of-memory error; only the first one is predicted"),
    "neftune_noise_alpha": (bool, "NEFTune adds a noise tensor of the embeddings' size"),
    "label_smoothing_factor": (bool, "label smoothing computes the loss outside the model, with more copies of the logits"),
    "activation_offloading": (bool, "activations move to pinned host memory; predicted as if they stayed"),
    "packing": (bool, "packed batches are one long sequence; predicted as max_length tokens per row"),
    "padding_free": (bool, "padding-free batches are one long sequence; predicted as max_length tokens per row"),
    "precompute_ref_log_probs": (bool, "reference log-probs are computed before training; the reference model still counts"),
    "vllm_mode": (lambda value: value == "colocate", "vLLM shares the GPU"),
    "fp8": (bool, "float8 linear layers are predicted in bfloat16"),
    "tensor_parallel_size": (lambda value: int(value) > 1, "tensor parallelism"),
    "pipeline_parallel_size": (lambda value: int(value) > 1, "pipeline parallelism"),
    "context_parallel_size": (lambda value: int(value) > 1, "context parallelism"),
    "jit_mode_eval": (bool, "TorchScript evaluation"),
}


def apply(sources: Sources) -> None:
    """Put every field that the script's arguments decide; strategy, DeepSpeed and FSDP are other files' business."""
    _apply_sizes(sources)
    _apply_model(sources)
    _apply_checkpointing(sources)
    if sources.is_trainer:
        _apply_trainer(sources)
    else:
        _apply_hand_written(sources)
    _note_not_modelled(sources)


def mixed_precision(sources: Sources) -> Setting:
    """Accelerate's mixed_precision. Trainer: --bf16/--fp16, else ACCELERATE_MIXED_PRECISION (training_args.py:__post_init__, 5.24);
    TRL turns bf16 on unless fp16 is (trl/trainer/base_config.py). A raw loop: Accelerator(mixed_precision=...), else the environment."""
    args = sources.args
    bf16, fp16 = args.setting("bf16"), args.setting("fp16")
    if sources.is_trainer:
        if _on(bf16) and _on(fp16):
            raise InputError("bf16 and fp16 are both on", where=str(bf16.origin if bf16 else ""), help="keep one of them", code="LG261")
        if _on(fp16) and fp16 is not None:
            return Setting("fp16", fp16.origin)
        if _on(bf16) and bf16 is not None:
            return Setting("bf16", bf16.origin)
        if sources.loop in TRL_LOOPS and (bf16 is None or bf16.value is None):
            return Setting("bf16", Origin(default_of("trl"), "bf16"))
        return _from_environment(sources) or Setting("no", (bf16.origin if bf16 else Origin(default_of("transformers"), "bf16")))
    if sources.loop != "accelerate":
        return Setting("no", Origin("hand-written training loop", "no Accelerator"))
    call = sources.source.first("Accelerator")
    stated = args.setting("mixed_precision") or (call.keywords.get("mixed_precision") if call else None)
    if stated is not None and stated.value is not None:
        return stated
    return _from_environment(sources) or Setting("no", Origin(default_of("accelerate"), "mixed_precision"))


def _from_environment(sources: Sources) -> Setting | None:
    value = sources.launch.environment.get("ACCELERATE_MIXED_PRECISION")
    if value is None:
        return None
    argument = sources.launch.arguments.get("mixed_precision")
    return Setting(value, argument.origin if argument else Origin("environment", "ACCELERATE_MIXED_PRECISION"))


def _on(setting: Setting | None) -> bool:
    return setting is not None and bool(setting.value)


# ---------------------------------------------------------------- sizes
def _apply_sizes(sources: Sources) -> None:
    args = sources.args
    batch = args.setting("per_device_train_batch_size") if sources.is_trainer else args.setting(*BATCH_NAMES)
    if sources.is_trainer and batch is not None and args.stated("per_device_train_batch_size") is None:
        batch = args.stated("per_gpu_train_batch_size", "micro_batch_size") or batch
    if batch is None or batch.value is None:
        batch = sources.source.loader_batch()
    sources.put("micro_batch_size", _positive(batch))
    accumulation = args.setting("gradient_accumulation_steps", "gradient_accumulation", "grad_accum_steps", "grad_accum")
    call = sources.source.first("Accelerator")
    if accumulation is None and call is not None:
        accumulation = call.keywords.get("gradient_accumulation_steps")
    sources.put("gradient_accumulation_steps", _positive(accumulation))
    length = args.stated(*SEQ_NAMES) or (args.setting("max_length") if sources.loop in TRL_LOOPS else None)
    if length is not None and length.value is None:
        message = f"{length.origin.key.lstrip('-')} is None: sequences are not truncated, so the longest one decides"
        sources.settings.note("LG212", "warning", message, length.origin)
    elif length is not None and isinstance(length.value, (int, float)) and length.value > 0:
        sources.put("seq_len", Setting(int(length.value), length.origin))


def _positive(setting: Setting | None) -> Setting | None:
    return None if setting is None or setting.value is None else Setting(positive(setting), setting.origin)


def fill_missing_sizes(sources: Sources) -> None:
    """Sizes that no source states: a value to go on with, and a note that says so."""
    settings = sources.settings
    if "seq_len" not in settings and sources.config is not None:
        limit = model_config.max_positions(sources.config)
        length = min(1024, limit) if limit else 1024
        settings.default("seq_len", length, Origin("default of launchguard", "seq_len"))
        if model_config.reads_tokens(sources.config):
            settings.note("LG210", "warning", f"no sequence length is stated: predicted for {length} tokens; give --seq-len", "seq_len")
    limit = model_config.max_positions(sources.config) if sources.config is not None else None
    if limit is not None and int(settings.get("seq_len", 0)) > limit and settings.origin("seq_len") is not None:
        message = f"{settings.get('seq_len')} tokens per sequence, but the model has {limit} positions"
        settings.note("LG226", "info", message, settings.origin("seq_len") or "")
    fill_missing_batch(sources)


def fill_missing_batch(sources: Sources) -> None:
    """One sample per rank, and a note that says so, when no source states the micro-batch."""
    settings = sources.settings
    if "micro_batch_size" not in settings:
        settings.default("micro_batch_size", 1, Origin("default of launchguard", "micro_batch_size"))
        message = "no batch size is stated: predicted for 1 sample per rank; give --micro-batch-size"
        settings.note("LG211", "warning", message, "micro_batch_size")


# ---------------------------------------------------------------- model
def _apply_model(sources: Sources) -> None:
    args, source = sources.args, sources.source
    call = source.model_call()
    sources.put("model.task", source.task())
    written = call.keywords.get("attn_implementation") if call else None
    sources.put("model.attn_implementation", args.stated("attn_implementation") or written)
    flash = args.stated("flash_attn", "use_flash_attention_2", "flash_attention")
    if flash is not None and flash.value in (True, "fa2") and "model.attn_implementation" not in sources.settings:
        sources.put("model.attn_implementation", Setting("flash_attention_2", flash.origin))
    sources.put("model.use_cache", args.setting("use_cache") if sources.is_trainer else args.stated("use_cache"))
    liger = args.setting("use_liger_kernel") or args.stated("use_liger", "enable_liger_kernel")
    if _on(liger) and liger is not None:
        _apply_liger(sources, liger.origin)
    sources.put("precision.load", load_dtype(sources))


def _apply_liger(sources: Sources, origin: Origin) -> None:
    """Liger's own code says which layers it replaces and what they keep (trace/liger.py); without it the model's own are simulated."""
    sources.put("model.use_liger_kernel", Setting(True, origin))
    config, where = _mapping(sources.args.stated("liger_kernel_config"))
    if config:
        sources.put("model.liger_kernel_config", Setting({str(k): bool(v) for k, v in config.items()}, where))
    if version_of("liger-kernel") is None:
        message = "liger-kernel is not installed here: predicted with the model's own layers and loss, which need more"
        sources.settings.note("LG312", "warning", message, origin)


def load_dtype(sources: Sources) -> Setting:
    """dtype that from_pretrained gives the parameters.

    A stated dtype wins; "auto" is the checkpoint's. TRL loads a model given as text in float32 (trl/trainer/utils.py:
    create_model_from_path, ModelConfig.dtype); transformers 5 keeps the checkpoint's dtype, 4 gave float32 (modeling_utils.py).
    """
    call = sources.source.model_call()
    written = [call.keywords[name] for name in DTYPE_NAMES if name in call.keywords] if call else []
    stated = sources.args.stated(*DTYPE_NAMES) or (written[0] if written else None)
    if stated is not None and stated.value not in (None, "auto"):
        return precision.dtype_setting(stated, "dtype")
    if stated is None and sources.loop in TRL_LOOPS and call is None:
        return Setting("float32", Origin(default_of("trl"), "dtype"))
    saved = model_config.checkpoint_dtype(sources.config or {})
    keeps = stated is not None or int((version_of("transformers") or "5").split(".")[0]) >= 5
    if saved is not None and keeps:
        name = str(sources.settings.get("model.source"))
        return precision.dtype_setting(Setting(saved, Origin(f"{name}/config.json", "dtype")), "dtype")
    return Setting("float32", Origin(default_of("transformers"), "dtype"))


# ---------------------------------------------------------------- activation checkpointing
def _apply_checkpointing(sources: Sources) -> None:
    """activation_checkpointing wins over its old name gradient_checkpointing (transformers 5.24 training_args.py:__post_init__)."""
    args = sources.args
    enabled = args.stated("activation_checkpointing", "gradient_checkpointing") or args.setting("gradient_checkpointing")
    if args.stated("disable_gradient_checkpointing") is not None:
        enabled = Setting(False, args.given["disable_gradient_checkpointing"].origin)
    if enabled is None:
        called = sources.source.used.get("gradient_checkpointing_enable") if not sources.is_trainer else None
        enabled = Setting(True, called) if called else None
    if enabled is None:
        return
    sources.put("activation_checkpointing.enabled", Setting(bool(enabled.value), enabled.origin))
    if not enabled.value:
        return
    kwargs, origin = _mapping(args.stated("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"))
    if "use_reentrant" in kwargs:
        sources.put("activation_checkpointing.use_reentrant", Setting(bool(kwargs["use_reentrant"]), origin))
    elif (version_of("transformers") or "5").split(".")[0] == "4" and sources.loop not in TRL_LOOPS:
        sources.put("activation_checkpointing.use_reentrant", Setting(True, Origin(default_of("transformers"), "use_reentrant")))
    _apply_partial_checkpointing(sources, kwargs, origin)
    for key in sorted(set(kwargs) - {"use_reentrant", "every_n_layers", "offload", "preserve_rng_state", "determinism_check"}):
        sources.settings.note("LG310", "warning", f"gradient_checkpointing_kwargs.{key} is not modelled", origin)


def _apply_partial_checkpointing(sources: Sources, kwargs: Mapping[str, Any], origin: Origin) -> None:
    """every_n_layers and offload, which the Trainer takes out of the keyword arguments (transformers 5.24 trainer.py:train)."""
    if "every_n_layers" in kwargs:
        sources.put(
            "activation_checkpointing.every_n_layers",
            Setting(positive(Setting(kwargs["every_n_layers"], dataclasses.replace(origin, key=f"{origin.key}.every_n_layers"))), origin),
        )
    if kwargs.get("offload"):
        sources.put("activation_checkpointing.offload", Setting(True, origin))


def _mapping(setting: Setting | None) -> tuple[dict[str, Any], Origin]:
    """A dict argument: a dict, or JSON text as training_args.py:_VALID_DICT_FIELDS reads it."""
    if setting is None or setting.value is None:
        return {}, Origin("default")
    value = setting.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InputError(f"{setting.origin.key} is not valid JSON: {error.msg.lower()}", where=str(setting.origin),
                             help="quote it for the shell: '{\"use_reentrant\": false}'", code="LG261") from None  # fmt: skip
    return (dict(value) if isinstance(value, Mapping) else {}), setting.origin


# ---------------------------------------------------------------- Trainer
def _apply_trainer(sources: Sources) -> None:
    args, settings = sources.args, sources.settings
    sources.put("max_grad_norm", args.setting("max_grad_norm"))
    if settings.get("max_grad_norm") == 0:
        settings.put("max_grad_norm", None, settings.origin("max_grad_norm") or Origin("default"))
    compiled = args.setting("torch_compile")
    if not _on(compiled):
        compiled = args.stated("torch_compile_backend", "torch_compile_mode")
    if _on(compiled) and compiled is not None:
        note_compile(sources, compiled.origin)
    apply_optim(sources)
    evaluation.apply(sources)
    saving.apply(sources)
    workers = args.setting("dataloader_num_workers")
    if workers is not None and str(workers.value).isdigit():
        settings.put("dataloader_workers", int(workers.value), workers.origin)


def note_compile(sources: Sources, origin: Origin) -> None:
    """torch.compile is predicted as eager: an upper bound for activations, not for inductor's own buffers."""
    sources.settings.put("compile", True, origin)
    sources.settings.note("LG311", "warning", "torch.compile is not modelled: predicted as the eager model", origin)


def apply_optim(sources: Sources) -> None:
    """--optim and --optim_args (transformers 5.24 training_args.py:OptimizerNames)."""
    setting = sources.args.setting("optim")
    if setting is None or setting.value is None:
        return
    name = str(setting.value)
    key, implementation = OPTIMIZERS.get(name, (name, "for_loop"))
    if name.startswith(_LESS_THAN_ADAMW):
        key, implementation = "adamw", "foreach"
        message = f"{name} is not modelled: predicted as adamw, whose states are larger"
        sources.settings.note("LG310", "warning", message, setting.origin)
    sources.put("optimizer.name", Setting(key, setting.origin))
    sources.put("optimizer.implementation", Setting(implementation, setting.origin))
    params = _optim_args(sources.args.stated("optim_args"))
    if params:
        sources.put("optimizer.params", Setting(params, sources.args.given["optim_args"].origin))


def _optim_args(setting: Setting | None) -> dict[str, Any]:
    """ "amsgrad=True,momentum=0.9" -> the entries that change memory (trainer.py:get_optimizer_cls_and_kwargs)."""
    params: dict[str, Any] = {}
    for pair in str(setting.value).replace(" ", "").split(",") if setting and setting.value else ():
        name, equals, text = pair.partition("=")
        if equals and name in _MEMORY_PARAMS:
            try:
                params[name] = json.loads(text.lower())
            except json.JSONDecodeError:
                params[name] = text
    return params


# ---------------------------------------------------------------- hand-written loops
def _apply_hand_written(sources: Sources) -> None:
    """A loop we do not read: outputs usually stay in a local variable while backward runs."""
    args, settings = sources.args, sources.settings
    sources.put("max_grad_norm", args.setting("max_grad_norm", "gradient_clipping", "grad_clip", "clip_grad_norm"))
    settings.put("outputs_alive_in_backward", True, Origin("hand-written training loop", "outputs"))
    call = sources.source.first("AdamW", "Adam", "SGD", *_OTHER_CLASSES)
    if call is not None and call.name in _OTHER_CLASSES:
        name, implementation = _OTHER_CLASSES[call.name]
        settings.put("optimizer.name", name, call.origin)
        settings.put("optimizer.implementation", implementation, call.origin)
    elif call is not None:
        settings.put("optimizer.name", call.name.lower(), call.origin)
        fused, foreach = call.keywords.get("fused"), call.keywords.get("foreach")
        implementation = "fused" if _on(fused) else "for_loop" if foreach is not None and foreach.value is False else "foreach"
        settings.put("optimizer.implementation", implementation, call.origin)
        params = {name: setting.value for name, setting in call.keywords.items() if name in ("amsgrad", "momentum") and setting.value}
        if params:
            settings.put("optimizer.params", params, call.origin)
    _apply_autocast(sources)
    stated = args.stated("optimizer", "optim")
    if stated is not None and str(stated.value).lower() in OPTIMIZERS:
        apply_optim_name(sources, stated)
    if "compile" in sources.source.used and any(name.startswith("compile") for name in args.given):
        note_compile(sources, args.given[next(name for name in args.given if name.startswith("compile"))].origin)


def _apply_autocast(sources: Sources) -> None:
    """torch.autocast("cuda", dtype=...) in the script; without a dtype CUDA's is float16 (torch/amp/autocast_mode.py)."""
    call = sources.source.first("autocast")
    if call is None or (call.keywords.get("enabled") is not None and not call.keywords["enabled"].value):
        return
    second = call.positional[1] if len(call.positional) > 1 else None  # autocast(device_type, dtype), cuda.amp.autocast(enabled, dtype)
    positional = Setting(second, call.origin) if isinstance(second, str) else None
    dtype = call.keywords.get("dtype") or positional or Setting("float16", Origin(default_of("torch"), "autocast dtype"))
    if dtype.value is not None:
        sources.put("precision.autocast", Setting(precision.dtype_setting(dtype, "autocast").value, call.origin))


def apply_optim_name(sources: Sources, setting: Setting) -> None:
    """A hand-written loop's --optimizer with a name of the Trainer's list."""
    key, implementation = OPTIMIZERS[str(setting.value).lower()]
    sources.put("optimizer.name", Setting(key, setting.origin))
    sources.put("optimizer.implementation", Setting(implementation, setting.origin))


def _note_not_modelled(sources: Sources) -> None:
    resumed = sources.args.stated("resume_from_checkpoint")
    if resumed is not None and str(resumed.value).lower() not in ("false", "none", "") and not sources.is_trainer:
        message = "what a hand-written loop holds while it loads a checkpoint is not modelled: predicted as a fresh start"
        sources.settings.note("LG310", "warning", f"resume_from_checkpoint = {resumed.value}: {message}", resumed.origin)
    for name, (matters, what) in _NOT_MODELLED.items():
        setting = sources.args.stated(name)
        try:
            if name in ("packing", "padding_free") and sources.options.get("lengths"):
                continue  # configs/lengths.py
            if setting is not None and matters(setting.value):
                sources.settings.note("LG310", "warning", f"{name} = {setting.value} is not modelled: {what}", setting.origin)
        except (TypeError, ValueError):
            continue
