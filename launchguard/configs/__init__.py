"""Files and script arguments -> JobSpec: one reader per format, each value with the place it came from.

Strength, strongest first: launchguard's own options, the script's arguments, the script's config file, values written in the script,
launchguard.yaml, the launcher's environment and the DeepSpeed JSON (merged as the real library merges them), library defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchguard.configs import (
    _installed,
    accelerate_yaml,
    deepspeed_json,
    diagnose,
    fsdp,
    generation,
    job_file,
    lengths,
    model_config,
    peft,
    precision,
    saving,
    script_args,
    script_source,
    trainer_checks,
    training_args,
)
from launchguard.configs._sources import TRL_LOOPS, Sources
from launchguard.configs.script_args import ScriptArguments
from launchguard.configs.script_source import ScriptSource
from launchguard.errors import InputError
from launchguard.installed import versions
from launchguard.job import TRAINER_LOOPS, JobSpec, LaunchSpec, Origin, Setting, Settings, build_job

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl")  # a prediction depends on their versions
_OPTION_FIELDS = ("device", "device_used", "headroom", "host_memory", "micro_batch_size", "seq_len")
_OPTION = "command line"
_LOOPS = (*TRAINER_LOOPS, "accelerate", "deepspeed", "torch")


def resolve(launch: LaunchSpec, options: Mapping[str, Any]) -> JobSpec:
    """The job that a launch starts.

    options: launchguard's own, strongest of all: "model", "device", "headroom", "micro_batch_size", "seq_len", "set" ({dotted field:
    text}), the files "deepspeed", "fsdp", "job" of a check without a command, and "validate": False to leave the installed DeepSpeed
    unasked. Raises InputError when a file or setting cannot be used.
    """
    options = {name: value for name, value in options.items() if value is not None}
    found = job_file.find(launch, options.get("job"))
    overlay = job_file.settings_of(*found) if found else {}
    files = job_file.files_of(found[1]) if found else {}
    asked = _asked(options)
    sources = _read(launch, {**files, **options}, overlay, asked)
    _apply_real(sources)
    _overlay(sources, overlay)
    for name, setting in asked.items():
        sources.settings.put(name, setting.value, setting.origin)
    _finish(sources)
    return build_job(launch, sources.settings, versions(_LIBRARIES))


def gpus_per_node(options: Mapping[str, Any], cwd: str) -> int | None:
    """GPUs of one node of the job: --gpus-per-node, else node: {gpus: N} of launchguard.yaml."""
    stated = options.get("gpus_per_node")
    if stated is not None:
        return int(stated)
    found = job_file.find_in(cwd, options.get("job"))
    return job_file.gpus_of(*found) if found else None


# ---------------------------------------------------------------- reading
def _read(launch: LaunchSpec, options: Mapping[str, Any], overlay: Mapping[str, Setting], asked: Mapping[str, Setting]) -> Sources:
    """Script, arguments, loop and model."""
    settings = Settings()
    source = script_source.read(launch)
    loop = _stated_loop(asked, overlay) or _loop(launch, source, options)
    settings.put("loop", loop.value, loop.origin)
    source, args = _arguments(launch, source, str(loop.value), options)
    _put_model(launch, options, overlay, source, args, settings)
    name = settings.get("model.source")
    revision = args.stated("model_revision", "revision")
    config = None
    if name is not None:
        origin = settings.origin("model.source") or Origin("model")
        config = model_config.load(name, origin, launch.cwd, launch.environment, str(revision.value) if revision else None)
        if config is not None:
            settings.put("model.config", config, origin)
    return Sources(launch, options, source, args, str(loop.value), config, settings, {**overlay, **asked})


def _stated_loop(asked: Mapping[str, Setting], overlay: Mapping[str, Setting]) -> Setting | None:
    """A loop that --set or launchguard.yaml names."""
    stated = asked.get("loop") or overlay.get("loop")
    if stated is not None and stated.value not in _LOOPS:
        raise InputError(f"unknown loop {stated.value!r}", where=str(stated.origin), help=f"one of {', '.join(_LOOPS)}")
    return stated


def _loop(launch: LaunchSpec, source: ScriptSource, options: Mapping[str, Any]) -> Setting:
    """Whose training loop runs: what the script uses, else what its arguments and name look like, else what the launcher is for."""
    seen = source.loop()
    if seen is not None:
        return seen
    plain = script_args.parse(launch.script_args, {})
    file = script_args.config_file_of(launch.script_args)
    given = {**(script_args.from_file(file, launch.cwd) if file else {}), **plain}
    script = (launch.script or "").rsplit("/", 1)[-1].lower()
    for loop, class_name in (("sft", "SFTConfig"), ("dpo", "DPOConfig")):
        own = set(_installed.dataclass_fields(class_name)) - set(_installed.dataclass_fields("_BaseConfig")) - {"max_length"}
        if loop in script.replace("-", "_").replace(".", "_").split("_") or (loop == "sft" and own & set(given) >= {"packing"}):
            return Setting(loop, Origin(launch.script or "script", "name"))
    if script.startswith(("axolotl.", "llamafactory.")):  # programs whose loop is transformers.Trainer's
        return Setting("trainer", Origin(launch.script or "script", "name"))
    trainer = set(_installed.dataclass_fields("TrainingArguments")) & set(given) - {"deepspeed", "seed", "learning_rate", "bf16", "fp16"}
    strong = {"per_device_train_batch_size", "output_dir", "fsdp", "optim", "num_train_epochs", "deepspeed"} & (trainer | set(given))
    raw = "deepspeed_config" in given or (given.get("deepspeed") or Setting("", Origin(""))).value is True
    if strong and not raw:
        return Setting("trainer", given[sorted(strong)[0]].origin)
    if launch.launcher == "deepspeed" or raw:
        return Setting("deepspeed", Origin(launch.launcher, "launcher"))
    return _loop_of_launcher(launch, options)


def _loop_of_launcher(launch: LaunchSpec, options: Mapping[str, Any]) -> Setting:
    """Without a script that can be read: "auto" in a DeepSpeed JSON is there for the Trainer to fill; --fsdp is its fsdp_config."""
    if options.get("deepspeed"):
        from launchguard.configs import _files

        text = _files.read_text(str(options["deepspeed"]), launch.cwd, "DeepSpeed config")
        return Setting("trainer" if '"auto"' in text else "deepspeed", Origin(str(options["deepspeed"]), '"auto"'))
    if options.get("fsdp"):
        return Setting("trainer", Origin(_OPTION, "--fsdp"))
    if launch.launcher == "accelerate":
        return Setting("accelerate", Origin("accelerate launch", "launcher"))
    return Setting("torch", Origin(launch.launcher, "launcher"))


def _arguments(launch: LaunchSpec, source: ScriptSource, loop: str, options: Mapping[str, Any]) -> tuple[ScriptSource, ScriptArguments]:
    """The script's arguments over its config file over its own literals, with the library's fields behind them; and the source with
    its `args.name` replaced by them."""
    class_name = {"sft": "SFTConfig", "dpo": "DPOConfig", "trainer": source.argument_class() or "TrainingArguments"}.get(loop)
    fields = dict(_installed.dataclass_fields(class_name)) if class_name else {}
    known = {**fields, **(_installed.dataclass_fields("ModelConfig") if loop in TRL_LOOPS else {})}
    file = script_args.config_file_of(launch.script_args)
    typed = {**(script_args.from_file(file, launch.cwd) if file else {}), **script_args.parse(launch.script_args, known)}
    source = source.bound({**source.defaults, **typed})
    given = {**source.defaults, **source.arguments(), **typed}
    if options.get("fsdp"):
        given.setdefault("fsdp", Setting(True, Origin(_OPTION, "--fsdp")))
        given["fsdp_config"] = Setting(str(options["fsdp"]), Origin(_OPTION, "--fsdp"))
    return source, ScriptArguments(given, fields)


def _put_model(
    launch: LaunchSpec, options: Mapping[str, Any], overlay: Mapping[str, Setting], source: ScriptSource, args: ScriptArguments,
    settings: Settings,
) -> None:  # fmt: skip
    """model.source: --model, script arguments, launchguard.yaml, the literal in from_pretrained("...")."""
    stated = args.stated(*training_args.MODEL_NAMES)
    candidates = (
        Setting(options.get("model"), Origin(_OPTION, "--model")),
        stated if stated is not None and isinstance(stated.value, str) else None,
        overlay.get("model.source"),
        source.model_name(),
    )
    chosen = next((candidate for candidate in candidates if candidate is not None and candidate.value), None)
    if chosen is not None:
        settings.put("model.source", str(chosen.value), chosen.origin)
        settings.put("model.python_path", launch.cwd, chosen.origin)


# ---------------------------------------------------------------- what the real programs would do
def _apply_real(sources: Sources) -> None:
    """Fields from the script, the launcher and the library, in the order in which they build on each other."""
    training_args.apply(sources)
    accelerate_yaml.apply(sources)
    document = deepspeed_json.find(sources)
    if document is not None:
        deepspeed_json.apply(sources, document)
    elif sources.is_trainer:
        fsdp.from_trainer(sources)
    if "strategy" not in sources.settings:
        _put_plain_strategy(sources)
    accelerate_yaml.apply_parallelism(sources)
    if sources.is_trainer:
        trainer_checks.refuse(sources)
    saving.apply_script(sources)
    peft.apply(sources)
    _put_data_parallel(sources)
    conf = next((name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in sources.launch.environment), None)
    if conf is not None:
        sources.settings.put("allocator_conf", sources.launch.environment[conf], Origin("environment", conf))


def _put_plain_strategy(sources: Sources) -> None:
    """Neither DeepSpeed nor Accelerate's FSDP: what the script wraps with, else DDP under any launcher of ranks.

    Under torchrun a Trainer or Accelerator wraps in DDP even with one rank (accelerate 1.15 state.py:PartialState: LOCAL_RANK is set).
    """
    settings, launch = sources.settings, sources.launch
    stated = sources.source.strategy() if sources.loop in ("torch", "deepspeed") else None
    ranks = launch.world_size > 1 or (launch.launcher in ("torchrun", "deepspeed") and sources.loop not in ("torch", "deepspeed"))
    if stated is not None:
        settings.put("strategy", stated.value, stated.origin)
        if str(stated.value).startswith("fsdp"):
            _put_script_fsdp(sources, str(stated.value))
    elif ranks:
        settings.put("strategy", "ddp", launch.world_size_origin)
        if sources.loop in ("torch", "deepspeed"):
            message = "how the script shards its model is not known: predicted as DDP; name the strategy in launchguard.yaml"
            settings.note("LG213", "warning", message, launch.script or launch.launcher)
    else:
        settings.put("strategy", "single", launch.world_size_origin)
    if settings.get("strategy") == "ddp":
        _put_ddp(sources)


def _put_data_parallel(sources: Sources) -> None:
    """One process in sight of several GPUs: the Trainer wraps in DataParallel, unless the model is quantised (transformers 5.24
    trainer.py:_wrap_model); Accelerate then prepares the optimizer alone, so that nothing casts (_prepare_for_training)."""
    settings, launch = sources.settings, sources.launch
    cards = launch.gpus_in_sight
    if launch.world_size > 1 or cards < 2 or settings.get("strategy") != "single" or settings.get("quantization.method") is not None:
        return
    if not sources.is_trainer:
        call = sources.source.first("DataParallel")
        if call is not None:
            message = "DataParallel in a hand-written loop is not modelled: its loss is made on the first GPU, of all GPUs' outputs"
            settings.note("LG302", "warning", message, call.origin)
        return
    origin = Origin(launch.launcher, f"one process sees {cards} GPUs")
    settings.put("strategy", "data_parallel", origin)
    settings.displaced.pop("strategy", None)  # nobody asked for "single"
    settings.put("cards", cards, origin)
    message = (
        f"one process sees {cards} GPUs: the Trainer uses DataParallel, and the first GPU holds all states and every GPU's outputs; "
        "bf16 and fp16 cast nothing there; start ranks with torchrun"
    )
    settings.note("LG200", "warning", message, origin)


def _put_script_fsdp(sources: Sources, strategy: str) -> None:
    """fsdp.* of a hand-written loop: what the first wrapping call and its mixed-precision policy say, else torch's defaults."""
    settings, source = sources.settings, sources.source
    call = source.first(*(("fully_shard",) if strategy == "fsdp2" else ("FSDP", "FullyShardedDataParallel")))
    origin = call.origin if call else Origin(source.name)
    settings.put("fsdp.version", int(strategy[-1]), origin)
    settings.put("fsdp.accelerate_grouping", False, origin)
    _put_script_wrap(sources, strategy, origin)
    if strategy == "fsdp1":
        settings.put("fsdp.backward_prefetch", "BACKWARD_PRE", Origin(_installed.default_of("torch"), "backward_prefetch"))
        settings.put("fsdp.use_orig_params", False, Origin(_installed.default_of("torch"), "use_orig_params"))
    for name in ("reshard_after_forward", "use_orig_params", "forward_prefetch", "limit_all_gathers"):
        if call is not None and name in call.keywords and isinstance(call.keywords[name].value, (bool, int)):
            sources.put(f"fsdp.{name}", call.keywords[name])
    sharding = call.keywords.get("sharding_strategy") if call is not None else None
    if strategy == "fsdp1" and sharding is not None and sharding.value in fsdp.STRATEGIES:
        sources.put("fsdp.sharding_strategy", sharding)
    offload = (call.keywords.get("cpu_offload") or call.keywords.get("offload_policy")) if call is not None else None
    if offload is not None and isinstance(offload.value, bool):
        sources.put("fsdp.offload_params", offload)
    policy = source.first("MixedPrecisionPolicy", "MixedPrecision")
    for keyword, field in (("param_dtype", "compute"), ("reduce_dtype", "reduce")):
        if policy is not None and keyword in policy.keywords:
            sources.put(f"precision.{field}", precision.dtype_setting(policy.keywords[keyword], keyword))


def _put_script_wrap(sources: Sources, strategy: str, origin: Origin) -> None:
    """The units of a hand-written loop. fully_shard called in more than one place is taken to mean one unit per layer."""
    settings, source = sources.settings, sources.source
    classes = source.wrapped_classes()
    calls = sum(call.name == "fully_shard" for call in source.calls)
    if classes is not None:
        settings.put("fsdp.wrap_policy", "TRANSFORMER_BASED_WRAP", classes.origin)
        settings.put("fsdp.wrap_classes", tuple(classes.value), classes.origin)
    elif calls > 1 and sources.config is not None:
        settings.put("fsdp.wrap_policy", "TRANSFORMER_BASED_WRAP", origin)
        message = "which modules the script shards is not read: predicted as one unit per layer (see fsdp: wrap_classes)"
        settings.note("LG214", "warning", message, origin)
    else:
        settings.put("fsdp.wrap_policy", "NO_WRAP", origin)
        message = "the script seems to shard the whole model as one unit; if not, fsdp: {wrap_classes: [...]} in launchguard.yaml"
        settings.note("LG214", "warning", message, origin)


def _put_ddp(sources: Sources) -> None:
    """ddp.*: the Trainer looks for unused parameters unless it checkpoints (transformers 5.24 trainer.py:_build_accelerator_args)."""
    args, settings = sources.args, sources.settings
    unused = args.stated("ddp_find_unused_parameters", "find_unused_parameters")
    call = sources.source.first("DDP", "DistributedDataParallel")
    if unused is None and sources.is_trainer:
        checkpointing = bool(settings.get("activation_checkpointing.enabled"))
        unused = Setting(not checkpointing, Origin(_installed.default_of("transformers"), "ddp_find_unused_parameters"))
    settings.put("ddp.find_unused_parameters", bool(unused.value) if unused else False,
                 unused.origin if unused else Origin(_installed.default_of("torch"), "find_unused_parameters"))  # fmt: skip
    static = args.stated("ddp_static_graph")
    if static is not None:
        settings.put("ddp.static_graph", bool(static.value), static.origin)
    for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
        if call is not None and name in call.keywords:
            sources.put(f"ddp.{name}", call.keywords[name])


# ---------------------------------------------------------------- stronger sources
def _overlay(sources: Sources, overlay: Mapping[str, Setting]) -> None:
    """launchguard.yaml: over files and defaults, under what the user typed for the script."""
    strong = {setting.origin for setting in sources.args.given.values()}
    for name, setting in overlay.items():
        if sources.settings.origin(name) not in strong:
            sources.settings.put(name, setting.value, setting.origin)


def _asked(options: Mapping[str, Any]) -> dict[str, Setting]:
    """launchguard's own options, which are questions ("what if?") and win over everything."""
    asked: dict[str, Setting] = {}
    for name in _OPTION_FIELDS:
        if name in options:
            origin = Origin(_OPTION, f"--{name.replace('_', '-')}")
            asked[name] = Setting(job_file.parse_text(name, options[name], origin), origin)
    dotted = {name: value for name, value in options.items() if "." in name}
    for name, value in {**dotted, **(options.get("set") or {})}.items():
        origin = Origin(_OPTION, f"--set {name}")
        asked[name] = Setting(job_file.parse_text(name, value, origin), origin)
    return asked


def _finish(sources: Sources) -> None:
    """What follows from the settled values."""
    settings = sources.settings
    strategy = str(settings.get("strategy"))
    if strategy.startswith("fsdp"):
        if settings.get("fsdp.version") != int(strategy[-1]):
            settings.put("fsdp.version", int(strategy[-1]), settings.origin("strategy") or Origin("strategy"))
        if sources.loop == "torch":
            settings.default("fsdp.accelerate_grouping", False, Origin("hand-written training loop", "fsdp"))
            policy = "MANUAL" if settings.get("fsdp.wrap_classes") else "NO_WRAP"
            settings.default("fsdp.wrap_policy", policy, Origin("default of launchguard", "fsdp.wrap_policy"))
    if strategy == "zero":
        mixed = training_args.mixed_precision(sources)
        settings.default("zero.stage", 0, Origin(_installed.default_of("deepspeed"), "stage"))
        settings.default("zero.dtype", precision.compute_dtype(mixed) or "float32", mixed.origin)
        settings.default("zero.zero_init", sources.loop not in ("deepspeed", "torch") and settings.get("zero.stage") == 3, mixed.origin)
    if strategy == "ddp":
        settings.default("ddp.find_unused_parameters", False, Origin(_installed.default_of("torch"), "find_unused_parameters"))
    accelerate_yaml.check_shard_groups(sources)
    lengths.apply(sources)
    generation.apply(sources)
    training_args.fill_missing_sizes(sources)
    peft.finish(sources)
    generation.apply_reference(sources)
    precision.derive(settings, training_args.mixed_precision(sources))
    settings.default("optimizer.name", "adamw", Origin("default of launchguard", "optimizer"))
    _note_conflicts(settings)
    diagnose.note(sources)
    other = sources.source.not_modelled()
    if other is not None:
        settings.note(
            "LG321", "warning", f"the loop of {other.value} is not modelled: predicted as a plain {sources.loop} loop", other.origin
        )


def _note_conflicts(settings: Settings) -> None:
    """Say which of two values that somebody wrote is in effect; a default that is replaced is no conflict."""
    for name, displaced in settings.displaced.items():
        for old in displaced:
            winner = settings.origin(name)
            if not old.origin.source.startswith(("default", "hand-written")) and old.value is not None and old.origin != winner:
                settings.note("LG209", "info", f"{name} is {settings.get(name)} ({winner}), not {old.value} ({old.origin})", winner or "")
