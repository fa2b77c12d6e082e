"""LoRA and quantisation from TRL's ModelConfig names, LLaMA-Factory's, axolotl's, and from LoraConfig(...) in the script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchguard.configs import precision, script_source
from launchguard.configs._installed import dataclass_fields, default_of
from launchguard.configs._sources import TRL_LOOPS, Sources
from launchguard.errors import InputError
from launchguard.installed import release, version_of
from launchguard.job import Origin, Setting

_NAMES: Mapping[str, tuple[str, ...]] = {  # field -> argument names, TRL's first
    "r": ("lora_r", "lora_rank", "peft_lora_r", "lora_dim"),
    "lora_alpha": ("lora_alpha", "peft_lora_alpha"),
    "lora_dropout": ("lora_dropout", "peft_lora_dropout"),
    "target_modules": ("lora_target_modules", "lora_target", "target_modules"),
    "modules_to_save": ("lora_modules_to_save", "modules_to_save", "additional_target"),
    "use_dora": ("use_dora", "peft_use_dora"),
    "bias": ("lora_bias", "bias"),
}
_SWITCHES = ("use_peft", "use_lora", "use_peft_lora", "lora", "enable_lora", "lora_enable")
TRL_PREPARES_NOTHING = (0, 27)
_METHODS = ("finetuning_type", "adapter", "peft_type", "tuner_type", "train_type")


def apply(sources: Sources) -> None:
    """Put lora.* and quantization.* when the job uses them."""
    switch = _switch(sources)
    _apply_quantization(sources)
    if switch is None or _not_handed_on(sources, switch):
        return
    call = sources.source.first("LoraConfig")
    trl = dataclass_fields("ModelConfig") if sources.loop in TRL_LOOPS and call is None else {}
    found = {field: _lora_setting(sources, field, names) for field, names in _NAMES.items()}
    for field, setting in found.items():
        if setting is None and (known := trl.get(_NAMES[field][0])) is not None:
            setting = Setting(known.default, known.origin)
        if setting is not None and setting.value is not None:
            sources.put(f"lora.{field}", Setting(_clean(field, setting), setting.origin))
    sources.settings.default("lora.r", 8, Origin(default_of("peft"), "r"))


def _switch(sources: Sources) -> Setting | None:
    """The setting that turns LoRA on; None when the job trains all weights."""
    args = sources.args
    switch = args.stated(*_SWITCHES)
    if switch is not None and isinstance(switch.value, bool):
        return switch if switch.value else None
    method = args.stated(*_METHODS)
    if method is not None and method.value is not None:
        if str(method.value).lower() in ("lora", "qlora", "dora"):
            return method
        if str(method.value).lower() not in ("full", "none", "false"):
            message = f"{method.value} fine-tuning is not modelled: predicted as full training"
            sources.settings.note("LG310", "warning", message, method.origin)
        return None
    call = sources.source.first("LoraConfig")
    if call is None or sources.source.unused_lora == call.origin:
        return _llama_factory(sources)
    return Setting(True, call.origin)


def _llama_factory(sources: Sources) -> Setting | None:
    """LLaMA-Factory trains LoRA unless finetuning_type says otherwise (LLaMA-Factory 0.9 hparams/finetuning_args.py)."""
    script, modules = str(sources.launch.script or ""), sources.source.modules
    if not script.startswith("llamafactory.") and not {"llamafactory", "llmtuner"} & set(modules):
        return None
    origin = Origin("default of LLaMA-Factory", "finetuning_type")
    sources.settings.default("lora.target_modules", "all-linear", Origin("default of LLaMA-Factory", "lora_target"))
    return Setting("lora", origin)


def _not_handed_on(sources: Sources, switch: Setting) -> bool:
    """LG236: True when --use_peft is TRL's, and a script that parses its arguments and makes its Trainer of them attaches no adapter."""
    source = sources.source
    trainer = source.trainer_call()
    whole = source.first(*script_source.ARGUMENT_PARSERS) is not None and trainer is not None and "args" in trainer.names
    names = {*source.used, *(trainer.names if trainer is not None else ())}
    if sources.loop not in TRL_LOOPS or not whole or any(word in name.lower() for name in names for word in ("peft", "lora", "**")):
        return False
    message = f"{switch.origin.key} is given, but the script hands no adapter to its Trainer: 100 % of the parameters train"
    sources.settings.note("LG236", "warning", message, switch.origin)
    return True


def _lora_setting(sources: Sources, field: str, names: tuple[str, ...]) -> Setting | None:
    call = sources.source.first("LoraConfig")
    return sources.args.stated(*names) or (call.keywords.get(field) if call else None)


def _clean(field: str, setting: Setting) -> Any:
    value = setting.value
    if field in ("target_modules", "modules_to_save"):
        names = value.split(",") if isinstance(value, str) else [str(name) for name in value]
        names = [name.strip() for entry in names for name in entry.split(",") if name.strip()]
        if field == "target_modules" and len(names) == 1:
            return _one_target(names[0])
        return tuple(names)
    try:
        return {"r": int, "lora_alpha": float, "lora_dropout": float, "use_dora": bool}.get(field, str)(value)
    except (TypeError, ValueError):
        raise InputError(f"lora {field} is {value!r}", where=str(setting.origin), help="give a number") from None


def _one_target(name: str) -> str | tuple[str, ...]:
    """One name alone may be a pattern or keyword of PEFT's (trl ModelConfig.__post_init__); LLaMA-Factory says "all"."""
    if name in ("all", "all-linear"):
        return "all-linear"
    return name if set(name) & set("*.|[(") else (name,)


# ---------------------------------------------------------------- quantisation
def _apply_quantization(sources: Sources) -> None:
    args = sources.args
    call = sources.source.first("BitsAndBytesConfig")
    keywords = call.keywords if call else {}

    def find(*names: str) -> Setting | None:
        return args.stated(*names) or next((keywords[name] for name in names if name in keywords), None)

    four, eight = find("load_in_4bit", "use_4bit_quantization", "use_4bit"), find("load_in_8bit", "use_8bit_quantization")
    bits = args.stated("quantization_bit", "quant_bits", "bits")
    method = args.stated("adapter")
    if four is None and (str(bits.value if bits else "") == "4" or (method is not None and method.value == "qlora")):
        four = Setting(True, (bits or method or Setting(None, Origin(""))).origin)
    if eight is None and bits is not None and str(bits.value) == "8":
        eight = Setting(True, bits.origin)
    on4, on8 = bool(four and four.value), bool(eight and eight.value)
    if on4 and on8:
        raise InputError("load_in_4bit and load_in_8bit are both on", where=str(four.origin if four else ""), help="keep one of them")
    if not (on4 or on8):
        _of_checkpoint(sources)
        return
    chosen = four if on4 else eight
    origin = chosen.origin if chosen else Origin("")
    kind = find("bnb_4bit_quant_type", "quantization_type")
    if on4:
        sources.put("quantization.method", kind or Setting(_default_kind(sources), origin))
    else:
        sources.put("quantization.method", Setting("int8", origin))
    nested = find("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization", "use_nested_quant")
    sources.put("quantization.double_quant", nested)
    _put_compute_dtype(sources, find("bnb_4bit_compute_dtype"), origin)
    _put_preparation(sources, on4, origin)
    storage = find("bnb_4bit_quant_storage")
    if on4 and storage is not None and storage.value not in (None, "uint8", "torch.uint8"):
        sources.put("quantization.quant_storage", precision.dtype_setting(storage, "bnb_4bit_quant_storage"))


def _put_preparation(sources: Sources, on4: bool, origin: Origin) -> None:
    """Who upcasts what is left unquantised. TRL did until 0.26 where the weights are not sharded (models/utils.py:prepare_peft_model of
    0.26.2; gone in 0.27.0), the Trainer and its scripts do when they call PEFT's function."""
    settings = sources.settings
    if sources.loop in TRL_LOOPS:
        version = version_of("trl")
        prepares = version is not None and release(version) < TRL_PREPARES_NOTHING and not _sharded_load(sources)
        settings.put("quantization.trl_casts", prepares and on4 and bool(settings.get("precision.autocast") == "bfloat16"), origin)
    else:
        prepares = "prepare_model_for_kbit_training" in sources.source.used or not sources.is_trainer or not sources.source.name
    settings.put("quantization.prepare_kbit", prepares, origin)


def _sharded_load(sources: Sources) -> bool:
    return sources.settings.get("strategy") in ("fsdp1", "fsdp2") or sources.settings.get("zero.stage") == 3


def _of_checkpoint(sources: Sources) -> None:
    """A checkpoint that was saved quantised (transformers 5.24 quantizers/auto.py:merge_quantization_configs reads it from config.json)."""
    stated = (sources.config or {}).get("quantization_config")
    if not isinstance(stated, Mapping):
        return
    origin = Origin(f"{sources.settings.get('model.source')}/config.json", "quantization_config")
    kind, bits = str(stated.get("quant_method", "bitsandbytes" if "load_in_4bit" in stated else "")), stated.get("bits")
    if kind == "bitsandbytes" and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        method = str(stated.get("bnb_4bit_quant_type", "fp4")) if stated.get("load_in_4bit") else "int8"
        sources.put("quantization.double_quant", Setting(bool(stated.get("bnb_4bit_use_double_quant")), origin))
        _put_compute_dtype(sources, Setting(stated.get("bnb_4bit_compute_dtype", "float32"), origin), origin)
    elif kind in ("gptq", "awq") and bits == 4:
        method = "gptq4"
        _put_compute_dtype(sources, Setting(sources.settings.get("precision.load", "float16"), origin), origin)
        if kind == "awq":
            sources.settings.note("LG310", "warning", "AWQ weights are predicted as GPTQ's: 4 bits, one scale for a group", origin)
    else:
        message = (
            f"weights quantised by {kind or 'an unknown method'} ({bits or '?'} bits) are not modelled: predicted unquantised, too high"
        )
        sources.settings.note("LG310", "warning", message, origin)
        return
    sources.settings.put("quantization.method", method, origin)
    sources.settings.put("quantization.prepare_kbit", "prepare_model_for_kbit_training" in sources.source.used, origin)


def _default_kind(sources: Sources) -> str:
    """TRL's ModelConfig says nf4; BitsAndBytesConfig itself says fp4 (transformers utils/quantization_config.py)."""
    return "fp4" if sources.source.first("BitsAndBytesConfig") is not None else "nf4"


def _put_compute_dtype(sources: Sources, stated: Setting | None, origin: Origin) -> None:
    """TRL passes the model's dtype (trl/trainer/utils.py:get_quantization_config); BitsAndBytesConfig's default is float32."""
    if stated is not None and stated.value is not None:
        sources.put("quantization.compute_dtype", precision.dtype_setting(stated, "bnb_4bit_compute_dtype"))
    elif sources.loop in TRL_LOOPS:
        sources.settings.put("quantization.compute_dtype", sources.settings.get("precision.load", "float32"), origin)
    elif sources.source.first("BitsAndBytesConfig") is not None:
        sources.settings.put("quantization.compute_dtype", "float32", Origin(default_of("transformers"), "bnb_4bit_compute_dtype"))


def finish(sources: Sources) -> None:
    """Rules that need the strategy (trl/trainer/sft_trainer.py:SFTTrainer.__init__, 1.16): ZeRO-3 keeps adapters in the base dtype and
    forces reentrant checkpointing; adapters over a quantised base become bfloat16."""
    settings = sources.settings
    if settings.get("zero.zero_init") and "quantization.method" in settings:
        where = settings.origin("quantization.method") or Origin("quantization")
        settings.put("zero.zero_init", False, where)
        settings.displaced.pop("zero.zero_init", None)  # LG229 says it
        message = "bitsandbytes loads around zero.Init: every rank loads the whole quantised model"
        settings.note("LG229", "warning", message, where)
    if sources.loop not in TRL_LOOPS or "lora.r" not in settings:
        return
    origin = Origin(f"trl {default_of('trl').rsplit(' ', 1)[-1]}", "SFTTrainer")
    quantized = "quantization.method" in settings
    zero3 = settings.get("strategy") == "zero" and settings.get("zero.stage") == 3
    if quantized or zero3:
        settings.default("lora.autocast_adapter_dtype", False, origin)
    if zero3 and settings.get("activation_checkpointing.enabled"):
        settings.put("activation_checkpointing.use_reentrant", True, origin)
