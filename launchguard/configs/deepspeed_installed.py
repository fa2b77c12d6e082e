"""What the installed DeepSpeed says of a config: is it valid, and which values do absent keys take. Imported only when asked."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from launchguard.configs import _files
from launchguard.configs._installed import environ
from launchguard.errors import InputError
from launchguard.installed import version_of
from launchguard.profiles.library_defaults import library_defaults

GRADIENT_CLIPPING = float(library_defaults("deepspeed").values["gradient_clipping"])

# Top-level keys that deepspeed 0.19.8 reads (runtime/config.py, constants.py and the sections' own modules) or that Hugging Face adds.
KNOWN_KEYS = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer scheduler "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print bf16 bfloat16 fp16 torch_autocast gradient_clipping "
    "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    "disable_allgather dump_state disable_python_gc vocabulary_size wall_clock_breakdown memory_breakdown checkpoint data_types "
    "dataloader_drop_last use_data_before_expert_parallelism log_level zero_optimization activation_checkpointing comms_logger tensorboard "
    "wandb csv_monitor comet flops_profiler autotuning hybrid_engine pipeline data_efficiency aio compile timers tensor_parallel "
    "expert_parallel weight_quantization sequence_parallel_size load_universal_checkpoint ds_config train_steps msamp amp "
    "compression_training sparse_gradients sparse_attention elasticity quantize_training eigenvalue graph_harvesting curriculum_learning "
    "progressive_layer_drop nebula data_types datastates zero_quantized_weights checkpoint_engine".split()
)

# "type" of the scheduler block: DeepSpeed's own (runtime/lr_schedules.py), then torch's (torch 2.13 optim/lr_scheduler.py).
SCHEDULERS = (
    "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR",
    "ConstantLR", "LinearLR", "ExponentialLR", "CosineAnnealingLR", "ChainedScheduler", "SequentialLR", "CyclicLR",
    "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
)  # fmt: skip

# "type" of the optimizer block in lower case -> (key of profiles/optimizers, implementation). deepspeed 0.19.8 runtime/engine.py.
_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adam": ("adam", "deepspeed_fused"), "adamw": ("adamw", "deepspeed_fused"), "lamb": ("lamb", "deepspeed_fused"),
    "lion": ("lion", "deepspeed_fused"), "muon": ("muon", "for_loop"), "adagrad": ("adagrad", "foreach"), "sgd": ("sgd", "foreach"),
    "rmsprop": ("rmsprop", "foreach"), "adafactor": ("adafactor_torch", "for_loop"), "radam": ("radam", "foreach"),
    "nadam": ("nadam", "foreach"), "adadelta": ("adadelta", "foreach"), "adamax": ("adamax", "foreach"), "rprop": ("rprop", "foreach"),
    "onebitadam": ("adam", "foreach"), "zerooneadam": ("adam", "foreach"), "onebitlamb": ("lamb", "foreach"),
    "muadam": ("adam", "foreach"), "muadamw": ("adamw", "foreach"), "musgd": ("sgd", "foreach"),
}  # fmt: skip


ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_TORCH_ONLY = ("ASGD", "LBFGS", "SparseAdam")  # of torch 2.13 optim/__init__.py, those that are not in _OPTIMIZERS


def knows_optimizer(name: str) -> bool:
    """False when runtime/engine.py:_configure_basic_optimizer finds the name neither in DeepSpeed nor in torch.optim."""
    return name.lower() in _OPTIMIZERS or name in _TORCH_ONLY


def optimizer(name: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """(profile, implementation) of an optimizer block. "Adam" is AdamW unless adam_w_mode is false; torch_adam takes torch's class."""
    key, implementation = _OPTIMIZERS.get(name.lower(), (name.lower(), "for_loop"))
    if key == "adam" and params.get("adam_w_mode", True):
        key = "adamw"
    if params.get("torch_adam"):
        implementation = "foreach"
    return key, implementation


def parse(text: str, name: str, relaxed: bool) -> dict[str, Any]:
    """The JSON text; relaxed: as hjson where it is installed, which is how deepspeed itself opens the file (comments are allowed)."""
    if relaxed and version_of("hjson") is not None:
        try:
            return _files.parse_json(text, name, "DeepSpeed config")
        except InputError:
            import hjson

            try:
                value = hjson.loads(text)
            except Exception:
                value = None
            if isinstance(value, dict):
                return {str(key): entry for key, entry in value.items()}
            raise
    return _files.parse_json(text, name, "DeepSpeed config")


def validated(tree: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Dotted key -> value that the installed DeepSpeed gives it, defaults included; None when DeepSpeed is not installed.

    Raises InputError with DeepSpeed's reason for a config it refuses. The batch triple is checked elsewhere: without a process group
    DeepSpeed takes the world to be one rank (runtime/config.py:DeepSpeedConfig.__init__).
    """
    if version_of("deepspeed") is None:
        return None
    document = copy.deepcopy(dict(tree))
    drop_auto(document)
    micro, steps = document.get("train_micro_batch_size_per_gpu") or 1, document.get("gradient_accumulation_steps") or 1
    document.update(train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps, train_batch_size=micro * steps)
    document.pop("sequence_parallel_size", None)
    with environ(DS_ACCELERATOR="cpu"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        config = _construct(document, name)
    zero = config.zero_config.model_dump(by_alias=True)
    return {f"zero_optimization.{key}": value for key, value in zero.items() if not isinstance(value, dict)}


def _construct(document: dict[str, Any], name: str) -> Any:
    try:
        from deepspeed.runtime.config import DeepSpeedConfig
    except Exception as error:
        message = f"the installed deepspeed cannot be imported ({error})"
        raise InputError(message, where="deepspeed", help="pip install deepspeed") from error
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return DeepSpeedConfig(document)
    except Exception as error:  # DeepSpeedConfigError, pydantic's ValidationError, AssertionError, ValueError, TypeError
        key, reason = _reason(error, document)
        raise InputError(f"deepspeed {version_of('deepspeed')} refuses the config: {reason}", where=f"{name}:{key}" if key else name,
                         help="remove or correct the key", code="LG251") from error  # fmt: skip
    finally:
        logger.setLevel(level)


def _reason(error: Exception, document: Mapping[str, Any]) -> tuple[str, str]:
    """(dotted key, one line) of an error. pydantic names the place inside its section, a removed key has a text of its own."""
    problems = getattr(error, "errors", None)
    if callable(problems):
        first = problems()[0]
        place = [str(part) for part in first.get("loc", ())]
        dotted = _find(document, place) or ".".join(place)
        return dotted, f"{dotted}: {str(first.get('msg', '')).lower()}"
    text = " ".join(str(error).split())
    return _removed_key(str(error)), text or type(error).__name__


def _find(section: Mapping[str, Any], place: list[str], prefix: str = "") -> str:
    """Dotted key of the first place in the document where this chain of keys stands."""
    node: Any = section
    for part in place:
        node = node.get(part, None) if isinstance(node, Mapping) and part in node else _find
    if node is not _find and place:
        return prefix + ".".join(place)
    inner = (_find(value, place, f"{prefix}{key}.") for key, value in section.items() if isinstance(value, Mapping))
    return next((found for found in inner if found), "")


def _removed_key(text: str) -> str:
    from deepspeed.runtime import config

    tables = (("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ""), ("_REMOVED_ZERO_CONFIG_KEYS", "zero_optimization."))
    return next((prefix + key for name, prefix in tables for key, reason in getattr(config, name, {}).items() if reason == text), "")


def drop_auto(section: dict[str, Any]) -> None:
    """Take "auto" out of a section, as DeepSpeed does (config_utils.py:DeepSpeedConfigModel.__init__): its default stands."""
    for key, value in list(section.items()):
        if value == "auto":
            del section[key]
        elif isinstance(value, dict):
            drop_auto(value)
