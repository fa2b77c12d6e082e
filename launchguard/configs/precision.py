"""From mixed-precision settings to the dtypes of job.Precision (knowledge/fsdp_accelerate_memory.md, sections 5.2 to 5.4)."""

from __future__ import annotations

from launchguard.errors import InputError
from launchguard.job import Origin, Setting, Settings
from launchguard.units import dtype_name

_COMPUTE = {"no": None, "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def dtype_setting(setting: Setting, where: str) -> Setting:
    """The setting with its dtype in canonical spelling. Raises InputError for a name that is no dtype."""
    try:
        return Setting(dtype_name(str(setting.value)), setting.origin)
    except ValueError as error:
        raise InputError(str(error), where=str(setting.origin) or where, help="use bfloat16, float16 or float32") from None


def compute_dtype(mixed_precision: Setting) -> str | None:
    """dtype of forward under Accelerate's mixed_precision; None for "no". fp8 keeps bf16 around its linear layers."""
    name = str(mixed_precision.value).lower()
    if name not in _COMPUTE:
        raise InputError(f"unknown mixed_precision {name!r}", where=str(mixed_precision.origin),
                         help=f"one of {', '.join(_COMPUTE)}", code="LG250")  # fmt: skip
    return _COMPUTE[name]


def derive(settings: Settings, mixed_precision: Setting) -> None:
    """Fill the precision fields that no source has stated, by strategy.

    fsdp2 (accelerate 1.15, accelerator.py:_prepare_fsdp2): params, gradients and outputs in the low dtype, shards upcast to float32.
    fsdp1 (accelerator.py:prepare_model): the same, with autocast and float32 outputs around the model.
    single, ddp: autocast and float32 outputs; parameters stay as loaded. zero: the engine's dtype, no autocast.
    """
    strategy = settings.get("strategy", "single")
    low = compute_dtype(mixed_precision)
    load = settings.get("precision.load", "float32")
    by = mixed_precision.origin
    if strategy == "zero":
        _derive_zero(settings, load)
    elif strategy in ("fsdp1", "fsdp2") and low is not None:
        upcast = load if _keeps_load_dtype(settings) else "float32"
        settings.default("precision.storage", upcast, by)
        settings.default("precision.compute", low, by)
        settings.default("precision.reduce", low, by)
        if strategy == "fsdp1":
            settings.default("precision.autocast", low, by)
            settings.default("precision.float32_outputs", True, by)
    else:
        origin = settings.origin("precision.load") or by
        for name in ("storage", "compute"):
            settings.default(f"precision.{name}", settings.get("precision.storage", load), origin)
        settings.default("precision.reduce", settings.get("precision.storage"), origin)
        casts = strategy != "data_parallel"  # Accelerate prepares the optimizer alone (transformers 5.24 trainer.py:_prepare_for_training)
        settings.default("precision.autocast", low if casts else None, by)
        settings.default("precision.float32_outputs", casts and low is not None, by)


def _keeps_load_dtype(settings: Settings) -> bool:
    """A hand-written torch loop shards what it has loaded; the upcast is Accelerate's."""
    return settings.get("loop") == "torch"


def _derive_zero(settings: Settings, load: str) -> None:
    """deepspeed/runtime/engine.py:_cast_module_mixed_precision; gradients travel in communication_data_type."""
    dtype = settings.get("zero.dtype", "float32")
    origin = settings.origin("zero.dtype") or Origin("deepspeed", "dtype")
    settings.default("precision.load", load, origin)
    settings.default("precision.storage", dtype, origin)
    settings.default("precision.compute", dtype, origin)
    settings.default("precision.reduce", settings.get("zero.communication_data_type") or dtype, origin)
