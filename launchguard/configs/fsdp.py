"""FSDP settings: TrainingArguments' --fsdp and --fsdp_config, and Accelerate's FSDP_* environment, as fsdp.* fields.

Defaults differ by the way in: the Trainer's version is 2 with TRANSFORMER_BASED_WRAP (transformers 5.24 training_args.py:
_process_fsdp_args), `accelerate launch`'s is 1 with NO_WRAP (accelerate 1.15 utils/dataclasses.py:FullyShardedDataParallelPlugin).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchguard.configs import _files, plugins
from launchguard.configs._installed import default_of
from launchguard.configs._sources import Sources
from launchguard.errors import InputError
from launchguard.job import Origin, Setting

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")  # torch's StateDictType, in its order
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_INERT_IN_2 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
_TRAINER_KEYS = {"version", "cpu_offload", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap", "state_dict_type",
                 "cpu_ram_efficient_loading", "activation_checkpointing", "reshard_after_forward", "xla", "xla_fsdp_v2",
                 "xla_fsdp_grad_ckpt", "xla_fsdp_settings", *_INERT_IN_2} - {"sharding_strategy"}  # fmt: skip
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # accelerate/utils/other: str_to_bool


def boolean(value: Any, origin: Origin) -> bool:
    """str_to_bool of transformers and accelerate. Raises InputError where they raise ValueError."""
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise InputError(f"{value!r} is neither true nor false", where=str(origin), help="write true or false", code=_refuser(origin))


def one_of(value: Any, allowed: tuple[str, ...], origin: Origin) -> str:
    """An enum member by name, in any case, or by its 1-based number (FSDP_SHARDING_STRATEGY.index(...) + 1)."""
    text = str(value).upper()
    if text.isdigit() and 1 <= int(text) <= len(allowed):
        return allowed[int(text) - 1]
    if text not in allowed:
        raise InputError(f"unknown value {value!r}", where=str(origin), help=f"one of {', '.join(allowed)}", code=_refuser(origin))
    return text


def _refuser(origin: Origin) -> str:
    """Code of the refusal: the plugin that accelerate launch fills, or the Trainer's arguments."""
    return "LG250" if "fsdp_config.fsdp_" in origin.key or origin.key.lower().lstrip("-").startswith("fsdp_") else "LG261"


def whole_number(setting: Setting) -> int:
    """A number that a library reads with int(). Raises InputError where that raises ValueError."""
    try:
        return int(setting.value)
    except (TypeError, ValueError):
        raise InputError(f"{setting.value!r} is not a whole number", where=str(setting.origin), help="write a number",
                         code=_refuser(setting.origin)) from None  # fmt: skip


# ---------------------------------------------------------------- TrainingArguments
def from_trainer(sources: Sources) -> bool:
    """Put fsdp.* from --fsdp and --fsdp_config; False when --fsdp is not given (fsdp_config alone has no effect)."""
    fsdp = sources.args.setting("fsdp")
    stated_config, axolotl = sources.args.stated("fsdp_config"), _axolotl_version(sources)
    if axolotl is not None and (fsdp is None or not fsdp.value):
        fsdp = Setting(True, axolotl.origin)
    if fsdp is None or not fsdp.value or str(fsdp.value).lower() == "false":
        if stated_config is not None and stated_config.value:
            sources.settings.note("LG223", "warning", "fsdp_config has no effect without --fsdp", stated_config.origin)
        return False
    options = _trainer_options(sources, stated_config)
    if axolotl is not None:
        options.setdefault("version", axolotl)
        options.update({"cpu_offload": options.pop("offload_params")} if "offload_params" in options else {})
    version = _Options(options).integer("version", 2, Origin(default_of("transformers"), "fsdp_config.version"))
    _legacy(fsdp, options, int(version.value))
    sources.settings.put("strategy", f"fsdp{version.value}", fsdp.origin)
    sources.put("fsdp.version", version)
    _put_trainer_options(sources, _Options(options), int(version.value))
    return True


def _axolotl_version(sources: Sources) -> Setting | None:
    """axolotl's own spelling: fsdp_version beside fsdp_config in its YAML, which it hands to Accelerate as FSDP_* variables, whether
    `fsdp:` is there or not (axolotl utils/trainer.py:setup_fsdp_envs, read as it was before 0.12); 1 where it names none."""
    script = str(sources.launch.script or "")
    config = sources.args.stated("fsdp_config")
    if config is None or not config.value or script.partition(".")[0] != "axolotl":
        return None
    return sources.args.stated("fsdp_version") or Setting(1, config.origin)


def _trainer_options(sources: Sources, stated: Setting | None) -> dict[str, Setting]:
    """fsdp_config as settings by key without the fsdp_ prefix; a dict, JSON text, or the name of a JSON file."""
    if stated is None or not stated.value:
        return {}
    value, source = stated.value, str(stated.origin)
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            value = _files.parse_json(value, source, "fsdp_config")
        else:
            source = value
            value = _files.read_mapping(value, sources.launch.cwd, "FSDP config")
    if not isinstance(value, Mapping):
        raise InputError(f"fsdp_config is a {type(value).__name__}, not keys and values", where=source, help="give a JSON file or object")
    return {str(key).removeprefix("fsdp_"): Setting(entry, Origin(source, str(key))) for key, entry in value.items()}


def _legacy(fsdp: Setting, options: dict[str, Setting], version: int) -> None:
    """--fsdp "full_shard auto_wrap offload" (training_args.py:_apply_legacy_fsdp_to_config); fsdp_config wins over it."""
    if fsdp.value is True or str(fsdp.value).lower() == "true":
        return
    for item in [str(item) for item in fsdp.value] if isinstance(fsdp.value, list) else str(fsdp.value).split():
        if item.upper() in STRATEGIES:
            if version == 2 and item not in ("full_shard", "shard_grad_op"):
                raise InputError(f"--fsdp {item} exists in FSDP1 only, and the version is 2", where=str(fsdp.origin),
                                 help='set "version": 1 in fsdp_config, or use full_shard', code="LG261")  # fmt: skip
            options.setdefault("reshard_after_forward", Setting(item == "full_shard" if version == 2 else item, fsdp.origin))
        elif item == "offload":
            options.setdefault("cpu_offload", Setting(True, fsdp.origin))
        elif item != "auto_wrap":
            raise InputError(f"unknown --fsdp option {item!r}", where=str(fsdp.origin),
                             help=f"one of {', '.join(s.lower() for s in STRATEGIES)}, offload, auto_wrap", code="LG261")  # fmt: skip


class _Options:
    """Typed access to fsdp_config with the Trainer's defaults."""

    def __init__(self, options: Mapping[str, Setting]) -> None:
        self.options = options

    def setting(self, key: str, default: Any) -> Setting:
        return self.options.get(key) or Setting(default, Origin(default_of("transformers"), f"fsdp_config.{key}"))

    def flag(self, key: str, default: bool) -> Setting:
        setting = self.setting(key, default)
        return Setting(boolean(setting.value, setting.origin), setting.origin)

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> Setting:
        setting = self.setting(key, default)
        return Setting(one_of(setting.value, allowed, setting.origin), setting.origin)

    def integer(self, key: str, default: int, origin: Origin) -> Setting:
        setting = self.options.get(key) or Setting(default, origin)
        try:
            return Setting(int(setting.value), setting.origin)
        except (TypeError, ValueError):
            raise InputError(f"{key} is {setting.value!r}, not a number", where=str(setting.origin), help=f"write {default}",
                             code="LG261") from None  # fmt: skip


def _put_trainer_options(sources: Sources, options: _Options, version: int) -> None:
    """training_args.py:_process_fsdp_args, key by key."""
    if version not in (1, 2):
        raise InputError(f"FSDP version {version} does not exist", where=str(options.setting("version", 2).origin), help="1 or 2",
                         code="LG261")  # fmt: skip
    sources.put("fsdp.offload_params", options.flag("cpu_offload", False))
    policy = options.choice("auto_wrap_policy", WRAP_POLICIES[0], WRAP_POLICIES)
    _put_wrap(sources, policy, options.options.get("transformer_layer_cls_to_wrap"),
              options.integer("min_num_params", 0, Origin(default_of("transformers"), "fsdp_config.min_num_params")))  # fmt: skip
    sources.put("fsdp.cpu_ram_efficient_loading", options.flag("cpu_ram_efficient_loading", False))
    sources.put("fsdp.state_dict_type", options.choice("state_dict_type", STATE_DICTS[0], STATE_DICTS))
    if "activation_checkpointing" in options.options:
        _put_checkpointing(sources, options.flag("activation_checkpointing", False))
    for key in sorted(set(options.options) - _TRAINER_KEYS):
        sources.settings.note("LG225", "warning", f"the Trainer does not read {key} and ignores it", options.options[key].origin)
    if version == 2:
        sources.put("fsdp.reshard_after_forward", options.flag("reshard_after_forward", True))
    note_inert(sources, version, {key: setting.origin for key, setting in options.options.items() if key != "sharding_strategy"})
    if version == 2 and "sharding_strategy" in options.options:
        _note_renamed(sources, options.options["sharding_strategy"].origin)
    if version == 2:
        return
    sources.put("fsdp.sharding_strategy", options.choice("reshard_after_forward", "full_shard", STRATEGIES))
    sources.put("fsdp.forward_prefetch", options.flag("forward_prefetch", False))
    _put_prefetch(sources, options.choice("backward_prefetch", "NO_PREFETCH", PREFETCH))
    sources.put("fsdp.use_orig_params", options.flag("use_orig_params", True))
    sources.put("fsdp.sync_module_states", options.flag("sync_module_states", True))
    sources.put("fsdp.limit_all_gathers", options.flag("limit_all_gathers", True))


# ---------------------------------------------------------------- Accelerate's environment
_FLAGS = {  # field -> (variable, version it exists in, default of the plugin without the variable)
    "offload_params": ("FSDP_OFFLOAD_PARAMS", 0, False), "cpu_ram_efficient_loading": ("FSDP_CPU_RAM_EFFICIENT_LOADING", 0, False),
    "use_orig_params": ("FSDP_USE_ORIG_PARAMS", 1, False), "sync_module_states": ("FSDP_SYNC_MODULE_STATES", 1, False),
    "forward_prefetch": ("FSDP_FORWARD_PREFETCH", 1, False), "reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", 2, True),
}  # fmt: skip


def from_environment(sources: Sources) -> None:
    """Put fsdp.* as FullyShardedDataParallelPlugin.__post_init__ reads FSDP_* (accelerate 1.15 utils/dataclasses.py)."""
    version = variable(sources, "FSDP_VERSION", "1")
    number = int(one_of(version.value, ("1", "2"), version.origin))
    sources.settings.put("strategy", f"fsdp{number}", variable(sources, "ACCELERATE_USE_FSDP", "true").origin)
    sources.settings.put("fsdp.version", number, version.origin)
    for name, (env_name, only, default) in _FLAGS.items():
        if only in (0, number):
            setting = variable(sources, env_name, default)
            sources.settings.put(f"fsdp.{name}", boolean(setting.value, setting.origin), setting.origin)
    policy = variable(sources, "FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    classes, size = variable(sources, "FSDP_TRANSFORMER_CLS_TO_WRAP", None), variable(sources, "FSDP_MIN_NUM_PARAMS", 0)
    _put_wrap(sources, Setting(one_of(policy.value, WRAP_POLICIES, policy.origin), policy.origin), classes if classes.value else None,
              Setting(whole_number(size), size.origin))  # fmt: skip
    kind = variable(sources, "FSDP_STATE_DICT_TYPE", STATE_DICTS[0] if number == 1 else STATE_DICTS[2])
    sources.settings.put("fsdp.state_dict_type", one_of(kind.value, STATE_DICTS, kind.origin), kind.origin)
    checkpointing = variable(sources, "FSDP_ACTIVATION_CHECKPOINTING", False)
    _put_checkpointing(sources, Setting(boolean(checkpointing.value, checkpointing.origin), checkpointing.origin))
    if number == 1:
        strategy = variable(sources, "FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        sources.settings.put("fsdp.sharding_strategy", one_of(strategy.value, STRATEGIES, strategy.origin), strategy.origin)
        prefetch = variable(sources, "FSDP_BACKWARD_PREFETCH", "NO_PREFETCH")
        _put_prefetch(sources, Setting(one_of(prefetch.value, PREFETCH, prefetch.origin), prefetch.origin))
        if sources.settings.get("fsdp.cpu_ram_efficient_loading"):
            sources.settings.put("fsdp.sync_module_states", True, variable(sources, "FSDP_CPU_RAM_EFFICIENT_LOADING", None).origin)
    note_inert(sources, number, {name.removeprefix("fsdp_"): setting.origin for name, setting in sources.launch.arguments.items()
                                 if not setting.origin.source.startswith("default")})  # fmt: skip
    _note_environment(sources)


def variable(sources: Sources, name: str, default: Any) -> Setting:
    """A variable of the ranks' environment, with the origin of the launcher's argument that made it; a plugin of the script's wins."""
    made = plugins.variables(sources).get(name)
    if made is not None:
        return made
    if name not in sources.launch.environment:
        return Setting(default, Origin(default_of("accelerate"), name))
    return Setting(sources.launch.environment[name], _argument_origin(sources, name))


def _argument_origin(sources: Sources, name: str) -> Origin:
    """ "FSDP_TRANSFORMER_CLS_TO_WRAP" -> origin of fsdp_transformer_layer_cls_to_wrap; the plain environment when no argument made it."""
    arguments = sources.launch.arguments
    lower = name.lower()
    candidates = (lower, {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}.get(lower, lower),
                  lower.removeprefix("accelerate_deepspeed_"), lower.removeprefix("accelerate_"),
                  {"accelerate_deepspeed_zero3_init": "zero3_init_flag", "accelerate_deepspeed_config_file": "deepspeed_config_file",
                   "accelerate_deepspeed_offload_optimizer_device": "offload_optimizer_device",
                   "accelerate_deepspeed_offload_param_device": "offload_param_device",
                   "accelerate_use_fsdp": "use_fsdp", "accelerate_use_deepspeed": "use_deepspeed"}.get(lower, lower))  # fmt: skip
    found = next((arguments[candidate].origin for candidate in candidates if candidate in arguments), None)
    return found or Origin("environment", name)


def note_inert(sources: Sources, version: int, stated: Mapping[str, Origin]) -> None:
    """Keys of one FSDP version under the other (accelerate 1.15 utils/dataclasses.py; commands/to_fsdp2.py names the successors)."""
    for key, origin in stated.items():
        if key in (_INERT_IN_2 if version == 2 else ()):
            sources.settings.note("LG227", "warning", f"{key} has no effect with FSDP2", origin)
    if version == 2 and "sharding_strategy" in stated:
        _note_renamed(sources, stated["sharding_strategy"])


def _note_renamed(sources: Sources, origin: Origin) -> None:
    """LG230: sharding_strategy is not read by FSDP2."""
    value = sources.settings.get("fsdp.reshard_after_forward")
    meaning = "FULL_SHARD: true, SHARD_GRAD_OP: false"
    message = f"FSDP2 calls sharding_strategy reshard_after_forward ({meaning}); {str(value).lower()} is in effect"
    sources.settings.note("LG230", "warning", message, origin)


def _note_environment(sources: Sources) -> None:
    for name, what in (("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "checkpointed activations move to pinned host memory"),
                       ("FSDP_IGNORED_MODULES", "ignored modules stay whole on every rank")):  # fmt: skip
        setting = variable(sources, name, None)
        if setting.value is not None and str(setting.value).lower() not in ("false", "none"):
            sources.settings.note("LG310", "warning", f"{name.lower()} is not modelled: {what}", setting.origin)


# ---------------------------------------------------------------- shared
def _put_wrap(sources: Sources, policy: Setting, classes: Setting | None, size: Setting) -> None:
    sources.put("fsdp.wrap_policy", policy)
    if policy.value == "TRANSFORMER_BASED_WRAP" and classes is not None and classes.value:
        names = classes.value.split(",") if isinstance(classes.value, str) else classes.value
        if not isinstance(names, (list, tuple)):
            raise InputError(f"{names!r} is not a list of class names", where=str(classes.origin), help="LlamaDecoderLayer,Other")
        sources.put("fsdp.wrap_classes", Setting(tuple(str(name).strip() for name in names), classes.origin))
    if policy.value == "SIZE_BASED_WRAP":
        sources.put("fsdp.min_num_params", size)


def _put_prefetch(sources: Sources, prefetch: Setting) -> None:
    """NO_PREFETCH is None to torch (utils/dataclasses.py); torch's own default, BACKWARD_PRE, is not what Accelerate passes."""
    value = None if prefetch.value == "NO_PREFETCH" else prefetch.value
    sources.settings.put("fsdp.backward_prefetch", value, prefetch.origin)


def _put_checkpointing(sources: Sources, setting: Setting) -> None:
    """FSDP's own checkpoint_wrapper; together with the model's it is refused (transformers 5.24 trainer.py)."""
    if not setting.value:
        return
    settings = sources.settings
    if settings.get("activation_checkpointing.enabled") and sources.is_trainer:
        other = settings.origin("activation_checkpointing.enabled")
        raise InputError("activation checkpointing is on twice, in the FSDP config and in the training arguments",
                         where=f"{setting.origin} and {other}", help="keep FSDP's and drop --gradient_checkpointing",
                         code="LG259")  # fmt: skip
    if settings.get("activation_checkpointing.enabled"):
        other = settings.origin("activation_checkpointing.enabled")
        message = f"activation checkpointing is on twice, also by {other}: each layer is computed three times; predicted once, by FSDP"
        settings.note("LG237", "warning", message, setting.origin)
    settings.put("activation_checkpointing.enabled", True, setting.origin)
    settings.put("activation_checkpointing.via", "fsdp", setting.origin)
    settings.put("activation_checkpointing.use_reentrant", False, setting.origin)  # checkpoint_wrapper as Accelerate and the Trainer ask
