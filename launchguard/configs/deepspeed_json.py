"""The DeepSpeed JSON, and the one Accelerate writes from its flags, as zero.*, optimizer.* and batch fields.

Three programs fill "auto" differently (knowledge/deepspeed_memory.md, section 10): raw DeepSpeed drops it, the Trainer
(transformers 5.24 integrations/deepspeed.py:HfTrainerDeepSpeedConfig) takes TrainingArguments, Accelerate (accelerate 1.15
utils/dataclasses.py:DeepSpeedPlugin, accelerator.py:_prepare_deepspeed) takes its environment and its dataloaders.
"""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launchguard.configs import (
    _files,
    accelerate_yaml,
    deepspeed_installed,
    fsdp,
    job_file,
    model_config,
    precision,
    script_source,
    training_args,
)
from launchguard.configs._installed import default_of
from launchguard.configs._sources import Sources
from launchguard.errors import InputError
from launchguard.job import Origin, Setting, ZeroSpec
from launchguard.units import dtype_name

_WHAT = "DeepSpeed config"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_HIDDEN = (  # key, value from the hidden size, only with stage 3 in the Trainer
    ("zero_optimization.reduce_bucket_size", lambda h: h * h, False),
    ("zero_optimization.stage3_prefetch_bucket_size", lambda h: int(0.9 * h * h), True),
    ("zero_optimization.stage3_param_persistence_threshold", lambda h: 10 * h, True),
)
_INTEGERS = ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
             "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "zero_hpz_partition_size")  # fmt: skip
_PLUGIN = (  # key, variable it comes from, default (accelerate 1.15 utils/dataclasses.py:DeepSpeedPlugin)
    ("zero_optimization.stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2),
    ("zero_optimization.offload_optimizer.device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
    ("zero_optimization.offload_param.device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", False),
)
_ELSEWHERE = {  # fields of ZeroSpec that do not stand in zero_optimization under their own name -> dotted key
    "grad_accum_dtype": "data_types.grad_accum_dtype", "communication_data_type": "communication_data_type",
    "offload_optimizer": "zero_optimization.offload_optimizer.device", "offload_param": "zero_optimization.offload_param.device",
    "offload_optimizer_buffer_count": "zero_optimization.offload_optimizer.buffer_count",
    "offload_param_buffer_count": "zero_optimization.offload_param.buffer_count",
    "offload_param_buffer_size": "zero_optimization.offload_param.buffer_size",
    "offload_pin_memory": "zero_optimization.offload_optimizer.pin_memory", "offload_ratio": "zero_optimization.offload_optimizer.ratio",
    "torch_autocast": "torch_autocast.enabled", "bf16_master_weights_and_grads": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states", "fp16_master_weights_and_grads": "fp16.fp16_master_weights_and_grads",
    "immediate_grad_update": "bf16.immediate_grad_update",
}  # fmt: skip
_LOW = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}  # mixed_precision -> section of the config
_SECTIONS = ("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16", "bfloat16",
             "optimizer", "optimizer.params", "scheduler", "scheduler.params", "data_types", "torch_autocast", "tensor_parallel",
             "compile")  # fmt: skip
_DERIVED = ("dtype", "zero_init")
_NOT_MODELLED = {  # dotted key -> what it would change
    "zero_optimization.zero_quantized_weights": "quantised gathers", "zero_optimization.zero_quantized_gradients": "quantised reductions",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen partitions in int8", "zero_optimization.zenflow": "ZenFlow",
    "zero_optimization.offload_optimizer.super_offload": "SuperOffload", "compile.deepcompile": "DeepCompile",
    "pipeline": "pipeline stages", "expert_parallel": "expert parallelism", "hybrid_engine.enabled": "the hybrid engine",
    "weight_quantization": "weight quantisation",
}  # fmt: skip
_INERT = {  # dotted key -> (severity, why)
    "activation_checkpointing": ("warning", "the engine never reads this block; a Hugging Face model needs --gradient_checkpointing"),
    "zero_optimization.allgather_bucket_size": ("info", "has no effect on memory with this DeepSpeed"),
    "zero_optimization.allgather_partitions": ("info", "has no effect on memory with this DeepSpeed"),
}


@dataclass
class Document:
    """A DeepSpeed config while it is completed. name: the file as the user wrote it; filled: origin of each value that replaced "auto"."""

    name: str
    tree: dict[str, Any]
    filled: dict[str, Origin] = dataclasses.field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a dotted key."""
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def has(self, key: str) -> bool:
        """True when the key stands in the config with a value."""
        return self.get(key) is not None

    def origin(self, key: str) -> Origin:
        """What gave the key its value."""
        return self.filled.get(key) or Origin(self.name, key)

    def setting(self, key: str) -> Setting | None:
        """Value and origin of a key that has a value."""
        return Setting(self.get(key), self.origin(key)) if self.has(key) else None

    def put(self, key: str, value: Any, origin: Origin) -> None:
        """Set a dotted key."""
        node = self.tree
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
        self.filled[key] = origin

    def fill(self, key: str, setting: Setting) -> None:
        """Replace "auto" (HfTrainerDeepSpeedConfig.fill_only)."""
        if self.get(key) == "auto":
            self.put(key, setting.value, setting.origin)


# ---------------------------------------------------------------- which config is in effect
def find(sources: Sources) -> Document | None:
    """The DeepSpeed config of the job; None when the job does not use DeepSpeed."""
    option = sources.options.get("deepspeed")
    if option:
        return _document(option, Origin("command line", "--deepspeed"), sources)
    stated = sources.args.setting("deepspeed") if sources.is_trainer else None
    if stated is not None and stated.value:
        return _document(stated.value, stated.origin, sources)
    if accelerate_yaml.uses(sources, "DEEPSPEED"):
        file = fsdp.variable(sources, "ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
        if file.value and str(file.value).lower() != "none":
            _refuse_ignored_fields(sources, str(file.value))
            return _document(file.value, file.origin, sources)
        return _inline(sources)
    if sources.loop == "deepspeed" or not sources.is_trainer:
        given = sources.args.stated("deepspeed_config", "deepspeed_config_file", "ds_config") or (
            sources.args.stated("deepspeed") if sources.loop == "deepspeed" else None)  # fmt: skip
        if given is not None and isinstance(given.value, str):
            return _document(given.value, given.origin, sources)
        call = sources.source.first("initialize")
        written = (call.keywords.get("config") or call.keywords.get("config_params")) if call and call.owner == "deepspeed" else None
        if written is not None:
            return _document(written.value, written.origin, sources)
    return _from_flags(sources) if sources.loop == "deepspeed" else None


def _from_flags(sources: Sources) -> Document | None:
    """A config that the script makes in its code, as far as --zero_stage and its usual companions tell (DeepSpeed-Chat's names)."""
    args = sources.args
    stage = args.stated("zero_stage")
    if stage is None:
        return None
    document = Document(str(stage.origin), {})
    document.put("zero_optimization.stage", stage.value, stage.origin)
    offload = args.stated("offload", "offload_optimizer", "cpu_offload")
    if offload is not None and offload.value:
        document.put("zero_optimization.offload_optimizer.device", "cpu", offload.origin)
    dtype = args.stated("dtype", "precision", "data_type")
    named = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(str(dtype.value).lower()) if dtype else None
    for section in ("bf16", "fp16"):
        flag = args.stated(section)
        if named == section and dtype is not None:
            document.put(f"{section}.enabled", True, dtype.origin)
        elif flag is not None and flag.value is True:
            document.put(f"{section}.enabled", True, flag.origin)
    message = "the script makes its DeepSpeed config itself: predicted from its arguments; give the JSON with --deepspeed"
    sources.settings.note("LG213", "warning", message, stage.origin)
    return document


def _document(value: Any, origin: Origin, sources: Sources) -> Document:
    """A file name, JSON text, base64 of JSON (deepspeed/runtime/config.py:DeepSpeedConfig.__init__), or a dict."""
    if isinstance(value, Mapping):
        return Document(str(origin), copy.deepcopy(dict(value)))
    text = str(value)
    if text.lstrip().startswith("{"):
        return Document(str(origin), _files.parse_json(text, str(origin), _WHAT))
    if len(text) > 64 and "." not in text and "/" not in text:
        try:
            return Document(str(origin), _files.parse_json(base64.urlsafe_b64decode(text).decode(), str(origin), _WHAT))
        except (binascii.Error, UnicodeDecodeError):
            pass
    content = _files.read_text(text, sources.launch.cwd, _WHAT)
    return Document(text, deepspeed_installed.parse(content, text, relaxed=sources.loop == "deepspeed"))


def _inline(sources: Sources) -> Document:
    """What DeepSpeedPlugin.__post_init__ writes when there is no JSON: stage, offload and batch keys only."""
    document = Document("accelerate", {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"})
    own = (("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
           ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "auto"))  # fmt: skip
    for key, name, default in (*own, *_PLUGIN):
        setting = fsdp.variable(sources, name, default)
        document.put(key, _literal(setting.value), setting.origin)
    return document


def _literal(value: Any) -> Any:
    text = str(value).lower()
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return value


def _refuse_ignored_fields(sources: Sources, file: str) -> None:
    """DeepSpeedPlugin._deepspeed_config_checks: with a JSON, the Accelerate config must not hold the same settings."""
    clashing = {"gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
                "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model", "mixed_precision"}  # fmt: skip
    given = sources.launch.environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    found = sorted(clashing & set(given))
    if found:
        origins = {name: sources.launch.arguments[name].origin for name in found if name in sources.launch.arguments}
        raise InputError(f"{', '.join(found)} cannot stand in the Accelerate config beside deepspeed_config_file {file}",
                         where=str(next(iter(origins.values()), file)), help=f"remove them there and set them in {file}",
                         code="LG254")  # fmt: skip


# ---------------------------------------------------------------- the config in full
def apply(sources: Sources, document: Document) -> None:
    """Complete the config as the program that owns the loop does, check it, and put its fields."""
    _check_sections(document)
    _check_scheduler(document)
    sources.settings.put("strategy", "zero", document.origin("zero_optimization.stage"))
    _ask_what_if(sources, document)
    _refuse_early_auto(sources)
    if sources.loop in ("deepspeed", "torch"):
        _complete_raw(sources, document)
    else:
        _refuse_other_precision(sources, document)
        if sources.is_trainer:
            _complete_trainer(sources, document)
        _complete_plugin(sources, document)
        _complete_hidden_size(sources, document)
        if not sources.is_trainer:
            _complete_accelerate(sources, document)
    _complete_deprecated(document)
    effective = deepspeed_installed.validated(document.tree, document.name) if sources.options.get("validate", True) else None
    _put_zero(sources, document, effective)
    _put_optimizer(sources, document)
    _put_clipping(sources, document)
    _note(sources, document)


def _check_sections(document: Document) -> None:
    """Sections that are looked into must be sections; DeepSpeed's own answer is a traceback or a pydantic list."""
    for key in _SECTIONS:
        value = document.get(key)
        if value is not None and value != "auto" and not isinstance(value, dict):
            raise InputError(f"{key} is {value!r}, not a section of keys and values", where=str(document.origin(key)),
                             help=f'"{key.rpartition(".")[2]}": {{...}}', code="LG251")  # fmt: skip


def _check_scheduler(document: Document) -> None:
    """deepspeed 0.19.8 runtime/engine.py:_scheduler_from_config, which is asked only when the engine is built."""
    name = document.get("scheduler.type")
    if name is not None and name not in deepspeed_installed.SCHEDULERS:
        raise InputError(f"DeepSpeed does not recognize LR scheduler {name}", where=str(document.origin("scheduler.type")),
                         help=f"one of {', '.join(deepspeed_installed.SCHEDULERS[:5])}", code="LG251")  # fmt: skip


def _ask_what_if(sources: Sources, document: Document) -> None:
    """zero.* of launchguard's own sources go into the config before it is completed, so that what depends on them follows."""
    for name, setting in sources.stated.items():
        part, _, rest = name.partition(".")
        if part == "zero" and rest not in _DERIVED and setting.value is not None:
            document.put(_ELSEWHERE.get(rest, f"zero_optimization.{rest}"), setting.value, setting.origin)


def _complete_raw(sources: Sources, document: Document) -> None:
    """Plain DeepSpeed: "auto" inside pydantic sections is dropped, an "auto" batch size is an error (config_utils.py)."""
    for key in (*_BATCH, "gradient_clipping"):
        if document.get(key) == "auto":
            message = f'{key} is "auto", which the Trainer or Accelerate fill, and neither runs here'
            raise InputError(message, where=str(document.origin(key)), help="write a number", code="LG256")
    for section in [value for value in document.tree.values() if isinstance(value, dict)]:
        deepspeed_installed.drop_auto(section)
    triple(sources, document)


def triple(sources: Sources, document: Document) -> None:
    """Any two of the batch sizes give the third (deepspeed/runtime/config.py:_set_batch_related_parameters), or contradict each other."""
    world = max(1, sources.launch.world_size // (_count(document, "sequence_parallel_size") or 1))
    total, micro, steps = (_count(document, key) for key in _BATCH)
    stated_total = total
    if total is None and micro is None:
        stated = sources.settings.get("micro_batch_size")
        if stated is None:
            raise InputError("neither train_batch_size nor train_micro_batch_size_per_gpu is given", where=document.name,
                             help="add train_micro_batch_size_per_gpu", code="LG252")  # fmt: skip
        micro = int(stated)
    if micro is None:
        micro = int(total or 0) // world // (steps or 1)
    if steps is None:
        steps = max(1, total // micro // world) if total is not None and micro else 1
    if stated_total is not None and stated_total != micro * steps * world:
        product = f"micro-batch {micro} x accumulation {steps} x {world} ranks = {micro * steps * world}"
        raise InputError(f"train_batch_size {stated_total} is not {product}",
                         where=", ".join(str(document.origin(key)) for key in _BATCH if document.has(key)),
                         help=f"set train_batch_size to {max(1, micro) * steps * world}, or drop it", code="LG252")  # fmt: skip
    for field, key, value in (("micro_batch_size", _BATCH[1], micro), ("gradient_accumulation_steps", _BATCH[2], steps)):
        given = next((name for name in (key, _BATCH[0]) if document.has(name)), None)
        source = document.origin(given) if given else Origin(default_of("deepspeed"), key)
        if document.has(key) or document.has(_BATCH[0]) or field not in sources.settings:
            sources.settings.put(field, value, source)


def _count(document: Document, key: str) -> int | None:
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or int(value) != value:
        raise InputError(f"{key} is {value!r}, not a positive number", where=str(document.origin(key)), help="write 1 or more",
                         code="LG251")  # fmt: skip
    return int(value)


# ---------------------------------------------------------------- Trainer
def _complete_trainer(sources: Sources, document: Document) -> None:
    """HfTrainerDeepSpeedConfig.trainer_config_process: fill "auto", and refuse what differs from TrainingArguments."""
    world = sources.launch.world_size
    args = sources.args
    micro, steps = sources.settings.get("micro_batch_size"), sources.settings.get("gradient_accumulation_steps")
    micro_origin = sources.settings.origin("micro_batch_size") or Origin("TrainingArguments", "per_device_train_batch_size")
    steps_origin = sources.settings.origin("gradient_accumulation_steps") or Origin("TrainingArguments", "gradient_accumulation_steps")
    mixed = training_args.mixed_precision(sources) if sources.loop in ("sft", "dpo") else None
    bf16, fp16 = (args.setting(name) or Setting(False, Origin("TrainingArguments", name)) for name in ("bf16", "fp16"))
    if mixed is not None:
        bf16 = Setting(mixed.value == "bf16", mixed.origin)
    expected = {
        "train_micro_batch_size_per_gpu": Setting(micro, micro_origin), "gradient_accumulation_steps": Setting(steps, steps_origin),
        "train_batch_size": Setting(world * int(micro or 1) * int(steps or 1), micro_origin),
        "gradient_clipping": args.setting("max_grad_norm") or Setting(1.0, Origin("TrainingArguments", "max_grad_norm")),
        "fp16.enabled": Setting(bool(fp16.value or args.get("fp16_full_eval")), fp16.origin),
        "bf16.enabled": Setting(bool(bf16.value or args.get("bf16_full_eval")), bf16.origin),
        "optimizer.params.lr": args.setting("learning_rate"), "optimizer.params.weight_decay": args.setting("weight_decay"),
        "optimizer.params.eps": args.setting("adam_epsilon"),
        "optimizer.params.betas": Setting([args.get("adam_beta1"), args.get("adam_beta2")], Origin("TrainingArguments", "adam_beta1")),
        "scheduler.params.warmup_max_lr": args.setting("learning_rate"), **_expected_steps(sources),
    }  # fmt: skip
    unchecked = ("train_micro_batch_size_per_gpu", "train_batch_size") if args.get("auto_find_batch_size") else ()
    mismatches = []
    for key, setting in expected.items():
        if setting is None:
            continue
        document.fill(key, setting)
        value = document.get(key)
        if value is not None and value != setting.value and key not in unchecked and None not in _flat(setting.value):
            mismatches.append((key, value, setting))
    if mismatches:
        _refuse_mismatches(document, mismatches)


def _expected_steps(sources: Sources) -> dict[str, Setting | None]:
    """Steps of the scheduler block, as far as they are known without the dataset (HfTrainerDeepSpeedConfig.trainer_config_finalize)."""
    args = sources.args
    total, warmup = args.stated("max_steps"), args.setting("warmup_steps")
    steps = int(total.value) if total is not None and isinstance(total.value, int) and total.value > 0 else None
    found: dict[str, Setting | None] = {}
    if total is not None and steps is not None:
        found["scheduler.params.total_num_steps"] = Setting(steps, total.origin)
    if warmup is None or not isinstance(warmup.value, (int, float)) or args.stated("warmup_ratio") is not None:
        return found
    share = 0 < warmup.value < 1  # a float below 1 is a share of all steps (TrainingArguments.get_warmup_steps)
    count = math.ceil(warmup.value * steps) if share and steps is not None else None if share else int(warmup.value)
    return {**found, "scheduler.params.warmup_num_steps": None if count is None else Setting(max(1, count), warmup.origin)}


def _refuse_mismatches(document: Document, mismatches: list[tuple[str, Any, Setting]]) -> None:
    """All of them at once: a user who mends one at a time starts the job as often (trainer_config_finalize does the same)."""
    facts = [f"{key} is {value}, but {setting.value} in the training arguments ({setting.origin})" for key, value, setting in mismatches]
    keys = ", ".join(key for key, _, _ in mismatches)
    raise InputError("; ".join(facts), where=", ".join(str(document.origin(key)) for key, _, _ in mismatches),
                     help=f'set {keys} to "auto", or make the values equal', code="LG253")  # fmt: skip


def _flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------- Accelerate
def _complete_plugin(sources: Sources, document: Document) -> None:
    """DeepSpeedPlugin.__post_init__ with a config, then set_mixed_precision."""
    if not isinstance(document.get("zero_optimization"), dict):
        raise InputError("the DeepSpeed config has no zero_optimization section", where=document.name,
                         help='add "zero_optimization": {"stage": 0..3}', code="LG251")  # fmt: skip
    if not document.has("gradient_accumulation_steps"):
        document.put("gradient_accumulation_steps", 1, Origin(default_of("accelerate"), "gradient_accumulation_steps"))
    for key, name, default in _PLUGIN:
        setting = fsdp.variable(sources, name, default)
        document.fill(key, Setting(_literal(setting.value), setting.origin))
    _complete_mixed_precision(sources, document)


def _complete_mixed_precision(sources: Sources, document: Document) -> None:
    """DeepSpeedPlugin.set_mixed_precision: a missing section is added."""
    mixed = training_args.mixed_precision(sources)
    wanted = _LOW.get(str(mixed.value).lower())
    for section in ("bf16", "fp16"):
        if wanted == section and document.get(section) is None:
            document.put(f"{section}.enabled", True, mixed.origin)
        document.fill(f"{section}.enabled", Setting(wanted == section, mixed.origin))


def _refuse_other_precision(sources: Sources, document: Document) -> None:
    """The same function, before the Trainer's own comparison: the other dtype must not be on in the config."""
    mixed = training_args.mixed_precision(sources)
    other = {"bf16": "fp16", "fp16": "bf16"}.get(_LOW.get(str(mixed.value).lower(), ""))
    if other and str(document.get(f"{other}.enabled")).lower() == "true":
        raise InputError(f"mixed_precision is {mixed.value} ({mixed.origin}), but the DeepSpeed config turns {other} on",
                         where=str(document.origin(f"{other}.enabled")),
                         help=f"set {other}.enabled to false, or mixed_precision to {other}", code="LG255")  # fmt: skip


def _complete_accelerate(sources: Sources, document: Document) -> None:
    """Accelerator._prepare_deepspeed: the dataloader's batch size, accumulation from the Accelerator, clipping 1.0."""
    settings = sources.settings
    steps_origin = settings.origin("gradient_accumulation_steps") or Origin(default_of("accelerate"), "gradient_accumulation_steps")
    document.fill("gradient_accumulation_steps", Setting(settings.get("gradient_accumulation_steps", 1), steps_origin))
    clipping = fsdp.variable(sources, "ACCELERATE_GRADIENT_CLIPPING", 1.0)
    document.fill("gradient_clipping", Setting(_literal(clipping.value), clipping.origin))
    if document.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        stated = sources.stated.get("micro_batch_size")
        if stated is not None:
            settings.put("micro_batch_size", stated.value, stated.origin)
        training_args.fill_missing_batch(sources)
        micro = int(settings.get("micro_batch_size"))
        origin = settings.origin("micro_batch_size") or Origin("dataloader", "batch_size")
        document.put("train_micro_batch_size_per_gpu", micro, origin)
    per_rank = (_count(document, "train_micro_batch_size_per_gpu") or 1) * (_count(document, "gradient_accumulation_steps") or 1)
    document.fill("train_batch_size", Setting(per_rank * sources.launch.world_size, document.origin("train_micro_batch_size_per_gpu")))
    triple(sources, document)


def _complete_hidden_size(sources: Sources, document: Document) -> None:
    """Bucket sizes of "auto" are made of the hidden size; the Trainer fills the stage-3 ones for stage 3 only."""
    stage = document.get("zero_optimization.stage")
    keys = [(key, rule) for key, rule, only3 in _HIDDEN
            if document.get(key) == "auto" and not (only3 and sources.is_trainer and stage != 3)]  # fmt: skip
    if not keys:
        return
    hidden = model_config.hidden_size(sources.config, nested=sources.is_trainer) if sources.config is not None else None
    if hidden is None:
        raise InputError(f'{keys[0][0].rpartition(".")[2]} is "auto", and the model has no hidden_size to make it of',
                         where=str(document.origin(keys[0][0])), help="write a number of elements", code="LG256")  # fmt: skip
    for key, rule in keys:
        document.put(key, rule(hidden), Origin(document.name, key))
        message = f'{key.rpartition(".")[2]} "auto" is {rule(hidden)} elements, from hidden size {hidden}'
        sources.settings.note("LG224", "info", message, document.origin(key))


def _complete_deprecated(document: Document) -> None:
    """cpu_offload and cpu_offload_param are still accepted (deepspeed/runtime/zero/config.py)."""
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if document.get(f"zero_optimization.{old}") is True and not document.has(f"zero_optimization.{new}"):
            document.put(f"zero_optimization.{new}.device", "cpu", Origin(document.name, f"zero_optimization.{old}"))


# ---------------------------------------------------------------- fields
def _put_zero(sources: Sources, document: Document, effective: Mapping[str, Any] | None) -> None:
    """zero.*: stated values with the file as origin, the installed DeepSpeed's defaults, else ZeroSpec's (deepspeed 0.19.8)."""
    default = Origin(default_of("deepspeed"))
    for spec in dataclasses.fields(ZeroSpec):
        if spec.name in _DERIVED:
            continue
        key = _ELSEWHERE.get(spec.name, f"zero_optimization.{spec.name}")
        value = document.get(key)
        origin = document.origin(key)
        if value is None or value == "auto":
            value = (effective or {}).get(key, spec.default)
            origin = Origin(default.source, key)
        sources.settings.put(f"zero.{spec.name}", _converted(spec.name, value, document, key), origin)
    if document.get("zero_optimization.overlap_comm") is None and effective is None:
        sources.settings.put("zero.overlap_comm", sources.settings.get("zero.stage") == 3, Origin(default.source, "overlap_comm"))
    _put_dtype(sources, document)
    _put_zero_init(sources, document)


def _converted(name: str, value: Any, document: Document, key: str) -> Any:
    if value is None:
        return None
    try:
        if name in ("grad_accum_dtype", "communication_data_type"):
            return dtype_name(str(value))
        if (name in _INTEGERS or name == "stage") and not isinstance(value, bool):
            return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{key} is {value!r}", where=str(document.origin(key)), help="see the DeepSpeed configuration reference",
                         code="LG251") from None  # fmt: skip
    return job_file.convert(f"zero.{name}", value, document.origin(key))


def _put_dtype(sources: Sources, document: Document) -> None:
    for section, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if str(document.get(f"{section}.enabled")).lower() == "true":
            sources.settings.put("zero.dtype", dtype, document.origin(f"{section}.enabled"))
            break
    else:
        key = next((f"{section}.enabled" for section in ("bf16", "fp16") if document.has(f"{section}.enabled")), "")
        sources.settings.put("zero.dtype", "float32", document.origin(key) if key else Origin(default_of("deepspeed"), "bf16.enabled"))
    if document.get("torch_autocast.enabled") is True:
        stated = Setting(document.get("torch_autocast.dtype") or "bfloat16", document.origin("torch_autocast.dtype"))
        low = precision.dtype_setting(stated, "torch_autocast.dtype").value
        sources.settings.put("precision.autocast", low, document.origin("torch_autocast.enabled"))


def _put_zero_init(sources: Sources, document: Document) -> None:
    """zero.Init: the Trainer and Accelerate register stage 3 whatever zero3_init_flag says (accelerate 1.15 utils/dataclasses.py:
    DeepSpeedPlugin.set_deepspeed_weakref), and from_pretrained looks at that alone; plain DeepSpeed leaves it to the script."""
    stage3 = sources.settings.get("zero.stage") == 3
    if sources.loop in ("deepspeed", "torch"):
        _put_own_zero_init(sources, stage3)
        return
    searching = sources.args.stated("auto_find_batch_size") if sources.is_trainer and stage3 else None
    if searching is not None and searching.value:  # transformers 5.24 trainer.py:create_accelerator_and_postprocess
        raise InputError("auto_find_batch_size is refused with ZeRO-3", where=str(searching.origin),
                         help="drop it: launchguard fit finds the largest micro-batch", code="LG257")  # fmt: skip
    makers = script_source.ARGUMENT_MAKERS if sources.is_trainer else ("Accelerator", "HfDeepSpeedConfig")
    early = sources.source.model_before(*makers) if stage3 else None
    if early is not None:
        sources.settings.put("zero.zero_init", False, early.origin)
        what = "the training arguments exist" if sources.is_trainer else "the Accelerator exists"
        message = f"the model is loaded before {what}, so zero.Init is off and every rank loads all of it"
        sources.settings.note("LG228", "warning", message, early.origin)
        return
    sources.settings.put("zero.zero_init", stage3, sources.settings.origin("zero.stage") or Origin(default_of("accelerate"), "zero.Init"))
    _refuse_device_map(sources)


def _put_own_zero_init(sources: Sources, stage3: bool) -> None:
    """A hand-written loop shards while it loads only inside deepspeed.zero.Init, or after an HfDeepSpeedConfig that it has made."""
    source = sources.source
    loads, makers = source.model_call(), ("HfDeepSpeedConfig", "Init")
    early = source.model_before(*makers) if stage3 else None
    call = source.first(*makers)
    used = call.origin if call is not None and early is None else None
    if loads is None:  # the model is made in another file, perhaps with what is only imported here
        used = used or source.used.get("Init") or source.used.get("HfDeepSpeedConfig")
    sources.settings.put("zero.zero_init", bool(used) and stage3, used or Origin(default_of("deepspeed"), "zero.Init not used"))
    if stage3 and used is None and loads is not None:
        message = "nothing registers ZeRO-3 before from_pretrained, so zero.Init is off and every rank loads all of the model"
        sources.settings.note("LG228", "warning", message, loads.origin)


def _refuse_device_map(sources: Sources) -> None:
    """transformers 5.24 integrations/accelerate.py:check_and_set_device_map; low_cpu_mem_usage is dropped there without a word."""
    call = sources.source.model_call()
    stated = sources.args.stated("device_map") or (call.keywords.get("device_map") if call else None)
    if stated is not None and stated.value is not None and sources.settings.get("zero.zero_init"):
        raise InputError(f"DeepSpeed ZeRO-3 is not compatible with passing a device_map ({stated.value})", where=str(stated.origin),
                         help="remove device_map: each rank holds its own shard", code="LG258")  # fmt: skip


def _refuse_early_auto(sources: Sources) -> None:
    """deepspeed.zero.Init(config_dict_or_path=...) is given to plain DeepSpeed, which does not fill "auto" (deepspeed 0.19.8 runtime/zero/
    partition_parameters.py:Init.__init__, runtime/config.py:_batch_assertion)."""
    call = sources.source.first("Init")
    written = (
        (call.keywords.get("config_dict_or_path") or call.keywords.get("config")) if call and call.owner in ("zero", "deepspeed") else None
    )
    if written is None:
        return
    document = _document(written.value, written.origin, sources)
    automatic = [key for key in _BATCH if document.get(key) == "auto"]
    if automatic:
        raise InputError(f'{", ".join(automatic)} in {document.name}: "auto" is filled by the Trainer, and zero.Init reads the file itself',
                         where=str(written.origin), help="write numbers for micro-batch and accumulation, and leave train_batch_size out",
                         code="LG256")  # fmt: skip


def _put_optimizer(sources: Sources, document: Document) -> None:
    """The optimizer block (deepspeed/runtime/engine.py:_configure_basic_optimizer), or the client's own, mapped to the CPU when offloaded
    (accelerate/utils/deepspeed.py:map_pytorch_optim_to_deepspeed)."""
    settings = sources.settings
    device = str(settings.get("zero.offload_optimizer") or "none")
    on_cpu = device != "none" and document.get("zero_force_ds_cpu_optimizer", True) is not False
    if document.has("optimizer.type"):
        name, params = str(document.get("optimizer.type")), document.get("optimizer.params") or {}
        origin = document.origin("optimizer.type")
        if not deepspeed_installed.knows_optimizer(name):
            raise InputError(f"DeepSpeed and torch.optim have no optimizer {name}", where=str(origin),
                             help="AdamW, Adam, Lamb, Lion, SGD, ...", code="LG251")  # fmt: skip
        key, implementation = deepspeed_installed.optimizer(name, params)
        if name.lower() in deepspeed_installed.ONE_BIT:
            message = f"the compressed communication of {name} is not modelled: predicted as {key}"
            settings.note("LG310", "warning", message, origin)
        settings.put("optimizer.name", key, origin)
        settings.put("optimizer.implementation", "cpu" if on_cpu else implementation, origin)
        kept = {name: params[name] for name in ("amsgrad", "momentum", "adam_w_mode") if name in params}
        if kept:
            settings.put("optimizer.params", kept, document.origin("optimizer.params"))
    elif on_cpu:
        if "bit" in str(settings.get("optimizer.name")) and sources.loop not in ("deepspeed", "torch"):
            name, where = settings.get("optimizer.name"), document.origin("zero_optimization.offload_optimizer.device")
            message = f"with offload_optimizer Accelerate replaces {name} by DeepSpeedCPUAdam: two float32 states on the host"
            settings.note("LG264", "warning", message, where)
            settings.put("optimizer.name", "adamw", where)
        settings.put("optimizer.implementation", "cpu", document.origin("zero_optimization.offload_optimizer.device"))


def _put_clipping(sources: Sources, document: Document) -> None:
    """gradient_clipping of the engine; the Trainer's own clipping is not run under DeepSpeed."""
    clipping = document.setting("gradient_clipping")
    if clipping is None:
        clipping = Setting(deepspeed_installed.GRADIENT_CLIPPING, Origin(default_of("deepspeed"), "gradient_clipping"))
    value = _literal(clipping.value)
    sources.settings.put("max_grad_norm", float(value) if isinstance(value, (int, float)) and value > 0 else None, clipping.origin)


# ---------------------------------------------------------------- notes
def _note(sources: Sources, document: Document) -> None:
    note = sources.settings.note
    for key, (severity, why) in _INERT.items():
        value = document.get(key)
        if value not in (None, False, {}) and not (isinstance(value, dict) and not any(value.values())):
            note("LG220", severity, f"{key}: {why}", document.origin(key))
    for key, what in _NOT_MODELLED.items():
        if document.get(key) not in (None, False, {}):
            note("LG320", "warning", f"{key} is not modelled: {what}", document.origin(key))
    for key, limit in (("tensor_parallel.autotp_size", 1), ("sequence_parallel_size", 1)):
        value = document.get(key)
        if value not in (None, 0) and (_count(document, key) or 0) > limit:
            note("LG320", "warning", f"{key} {document.get(key)} is not modelled: predicted as data parallelism", document.origin(key))
    for name in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{name}.device"
        if document.get(key) == "nvme":
            message = f"{name} to nvme: the host is predicted to hold DeepSpeed's pinned buffers for it; reads and writes under way are not"
            note("LG320", "info", message, document.origin(key))
    stage = int(sources.settings.get("zero.stage") or 0)
    if sources.settings.get("zero.offload_param") not in (None, "none") and stage != 3:
        origin = document.origin("zero_optimization.offload_param.device")
        note("LG221", "warning", f"offload_param has no effect with stage {stage}", origin)
        sources.settings.put("zero.offload_param", "none", origin)
    for key in sorted(set(document.tree) - deepspeed_installed.KNOWN_KEYS):
        note("LG222", "warning", f"DeepSpeed does not know the key {key} and ignores it", document.origin(key))
