"""What the settled configuration really means, where that is seldom what was meant: one function per diagnostic.

They look at the finished settings and at what the user wrote; nothing is set here. Conflicts between two sources are noted where the
sources are merged (LG209), keys that a reader ignores where it reads them (LG220 to LG227).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from launchguard.configs import trainer_checks, training_args
from launchguard.configs._installed import default_of
from launchguard.configs._sources import Sources
from launchguard.job import Origin

_STAGE_IN_NAME = re.compile(r"(?:zero|stage|(?<![a-z])z)[-_]?([0-3])(?!\d)", re.IGNORECASE)
_OWN_LOOPS = ("torch", "deepspeed")
_GENERAL = frozenset({"debug", "cpu", "use_cpu", "quiet", "module", "tpu", "help", "role", "log_dir", "launcher", "seed", "local_rank"})


def note(sources: Sources) -> None:
    """Every diagnostic that applies to the job."""
    for diagnostic in DIAGNOSTICS:
        diagnostic(sources)


def _nothing_to_shard(sources: Sources) -> None:
    """LG248: sharding over one rank (deepspeed and torch divide by the group's size)."""
    settings, strategy = sources.settings, str(sources.settings.get("strategy"))
    if sources.launch.world_size > 1:
        return
    stage = int(settings.get("zero.stage") or 0)
    if strategy == "zero" and stage:
        what, offloads = f"ZeRO stage {stage}", str(settings.get("zero.offload_optimizer") or "none") != "none"
    elif strategy.startswith("fsdp"):
        what, offloads = "FSDP", bool(settings.get("fsdp.offload_params"))
    else:
        return
    rest = "; its offload still works" if offloads else ": every state is whole on this GPU"
    settings.note("LG248", "warning", f"{what} with one process has nothing to shard{rest}", settings.origin("strategy") or "strategy")


def _replicated_under_deepspeed(sources: Sources) -> None:
    """LG247: the deepspeed launcher only starts processes; without a config the Trainer wraps them in DDP."""
    if sources.launch.launcher == "deepspeed" and sources.settings.get("strategy") == "ddp" and sources.loop not in _OWN_LOOPS:
        message = "deepspeed starts the ranks, but no DeepSpeed config reaches the script: DDP, and every rank holds the whole model"
        sources.settings.note("LG247", "warning", message, "deepspeed")


def _stage_in_file_name(sources: Sources) -> None:
    """LG243: the content counts, whatever the file is called."""
    origin, stage = sources.settings.origin("zero.stage"), sources.settings.get("zero.stage")
    named = _STAGE_IN_NAME.search(os.path.basename(origin.source)) if origin is not None else None
    if named and sources.settings.get("strategy") == "zero" and int(named.group(1)) != stage:
        sources.settings.note(
            "LG243", "warning", f"{origin.source if origin else ''} is stage {stage}, not what its name says", origin or ""
        )


def _fsdp_version(sources: Sources) -> None:
    """LG230: the Trainer's version 2 by default (transformers 5: training_args.py:_process_fsdp_args), whatever --fsdp says."""
    version, fsdp = sources.settings.origin("fsdp.version"), sources.args.stated("fsdp")
    if sources.is_trainer and fsdp is not None and isinstance(fsdp.value, str) and version and version.source.startswith("default"):
        message = (
            f"--fsdp {fsdp.value!r} means FSDP{sources.settings.get('fsdp.version')} with {version.source.removeprefix('default of ')}"
        )
        sources.settings.note("LG230", "info", f'{message}; "version": 1 in fsdp_config gives FSDP1', fsdp.origin)


def _wrap_policy(sources: Sources) -> None:
    """LG232, LG244: what is one unit, when no class is named (accelerate 1.15 utils/dataclasses.py:set_auto_wrap_policy)."""
    settings = sources.settings
    if not str(settings.get("strategy")).startswith("fsdp") or sources.loop in _OWN_LOOPS:
        return
    policy, origin = settings.get("fsdp.wrap_policy"), settings.origin("fsdp.wrap_policy") or Origin("fsdp")
    if policy == "TRANSFORMER_BASED_WRAP" and not settings.get("fsdp.wrap_classes"):
        settings.note("LG232", "info", "no layer class is named: the model's own _no_split_modules become FSDP units", origin)
    elif policy == "NO_WRAP" or (policy == "SIZE_BASED_WRAP" and not settings.get("fsdp.min_num_params")):
        settings.note("LG244", "warning", "no wrap policy is in effect: the whole model is one FSDP unit, gathered at once", origin)


def _upcast(sources: Sources) -> None:
    """LG233: Accelerate upcasts what it trains under mixed precision (accelerate 1.15 accelerator.py:prepare_model, _prepare_fsdp2)."""
    settings = sources.settings
    load, storage = settings.get("precision.load"), settings.get("precision.storage")
    fsdp = str(settings.get("strategy")).startswith("fsdp") and sources.loop not in _OWN_LOOPS
    if fsdp and storage == "float32" and load not in (None, "float32"):
        message = f"parameters are loaded in {load}, and Accelerate turns what is trained into float32: shards, gradients, states and saves"
        settings.note("LG233", "info", message, settings.origin("precision.storage") or "mixed_precision")


def _mixed_precision_source(sources: Sources) -> None:
    """LG235: the launcher's mixed precision and the script's."""
    launched = sources.launch.environment.get("ACCELERATE_MIXED_PRECISION")
    argument = sources.launch.arguments.get("mixed_precision")
    if launched is None or sources.loop in _OWN_LOOPS or (argument is not None and argument.origin.source.startswith("default")):
        return
    used, where = training_args.mixed_precision(sources), str(argument.origin if argument else "environment")
    if used.value != launched:
        message = f"mixed precision is {used.value} ({used.origin}), not {launched} of the launcher ({where}): the script's own value wins"
        sources.settings.note("LG235", "warning", message, used.origin)
    elif sources.is_trainer and launched != "no" and sources.args.stated(launched) is None:
        message = f"mixed precision {launched} comes from the launcher; transformers before 4.30 took it from --{launched} alone"
        sources.settings.note("LG235", "info", message, where)


def _lora_not_attached(sources: Sources) -> None:
    """LG236: a LoraConfig that nothing in the script takes."""
    unused = sources.source.unused_lora
    if unused is not None and "lora.r" not in sources.settings:
        message = "a LoraConfig is made but given to nothing: no adapter is attached, and 100 % of the parameters train"
        sources.settings.note("LG236", "warning", message, unused)


def _pinned_device(sources: Sources) -> None:
    """LG241: cuda:0 written out in a script of several ranks."""
    pinned = sources.source.pinned_device
    if pinned is not None and sources.launch.nproc_per_node > 1:
        message = f"the script names cuda:0, so all {sources.launch.nproc_per_node} ranks of a node would put that on its first GPU"
        sources.settings.note("LG241", "warning", f"{message}; each rank is predicted on its own", pinned)


def _fsdp_checkpointing(sources: Sources) -> None:
    """LG242: accelerate 1.15 utils/fsdp_utils.py:fsdp2_apply_ac and accelerator.py wrap layers with CheckpointImpl.NO_REENTRANT."""
    settings = sources.settings
    if settings.get("activation_checkpointing.via") == "fsdp" and settings.get("activation_checkpointing.enabled"):
        message = "FSDP's own checkpointing is non-reentrant: a layer whose recomputation saves other tensors than its forward is refused"
        settings.note("LG242", "info", message, settings.origin("activation_checkpointing.via") or "fsdp")


def _checkpointing_flag_not_read(sources: Sources) -> None:
    """LG238: a hand-written loop that takes the flag and never calls gradient_checkpointing_enable (nor hands the flag on)."""
    flag, source = sources.args.stated("gradient_checkpointing", "activation_checkpointing"), sources.source
    readers = (
        "gradient_checkpointing_enable",
        "gradient_checkpointing",
        "apply_activation_checkpointing",
        "checkpoint_wrapper",
        "checkpoint",
    )
    if flag is None or flag.value is not True or sources.is_trainer or not source.name or any(name in source.used for name in readers):
        return
    message = "the script takes this flag and never calls gradient_checkpointing_enable: it may do nothing; predicted as on"
    sources.settings.note("LG238", "warning", message, flag.origin)


def _flag_behind_the_script(sources: Sources) -> None:
    """LG216: a flag that the launcher has and the script, whose whole source is known, does not. The flags that decide the world are
    noted where the launch line is read."""
    source, launch = sources.source, sources.launch
    if not source.name or source.foreign():
        return
    known = source.declared | set(source.used) | set(sources.args.fields) | _GENERAL
    for word in launch.script_args:
        flag = word.split("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        noted = any(note.code == "LG216" and flag in note.message.split() for note in launch.notes)
        if flag.startswith("--") and name in launch.arguments and name not in known and not noted:
            message = f"{flag} stands behind the script, which has no such argument: {launch.launcher} does not see it"
            sources.settings.note("LG216", "warning", message, f"command line:{flag}")


def _adapters_left_out(sources: Sources) -> None:
    """LG236: LoRA's numbers without its switch (trl 1.16 trainer/utils.py:get_peft_config gives None unless use_peft)."""
    args, stated = sources.args, sources.args.stated("lora_r", "lora_target_modules", "lora_alpha")
    uses = "get_peft_config" in sources.source.used
    if sources.is_trainer and uses and stated is not None and "lora.r" not in sources.settings and args.stated("use_peft") is None:
        message = f"{stated.origin.key} is given without --use_peft: no adapter is attached, and 100 % of the parameters train"
        sources.settings.note("LG236", "warning", message, stated.origin)


def _zero3_init_flag(sources: Sources) -> None:
    """LG239: accelerate 1.15 utils/dataclasses.py:DeepSpeedPlugin.set_deepspeed_weakref registers ZeRO-3 whatever zero3_init_flag is."""
    argument = sources.launch.arguments.get("zero3_init_flag")
    off = argument is not None and str(argument.value).lower() == "false" and not argument.origin.source.startswith("default")
    if off and argument is not None and sources.settings.get("zero.zero_init") and sources.settings.get("zero.stage") == 3:
        message = (
            f"zero3_init_flag is false, but from_pretrained loads sharded all the same ({default_of('accelerate')[11:]} registers ZeRO-3)"
        )
        sources.settings.note("LG239", "warning", message, argument.origin)


def _eight_bits_under_fsdp(sources: Sources) -> None:
    """LG264: what Accelerate does with a bitsandbytes optimizer while it wraps (accelerate 1.15 accelerator.py:_prepare_fsdp2 keeps it)."""
    settings, name = sources.settings, str(sources.settings.get("optimizer.name"))
    if str(settings.get("strategy")).startswith("fsdp") and "8bit" in name and sources.loop not in _OWN_LOOPS:
        message = f"{name} keeps its 8-bit states under FSDP; accelerate 0.21 turned it into a 32-bit one (its issue 1902)"
        settings.note("LG264", "info", message, settings.origin("optimizer.name") or "optimizer")


DIAGNOSTICS: tuple[Callable[[Sources], None], ...] = (
    _nothing_to_shard, _replicated_under_deepspeed, _stage_in_file_name, _fsdp_version, _wrap_policy, _upcast, _mixed_precision_source,
    _lora_not_attached, _pinned_device, _fsdp_checkpointing, _checkpointing_flag_not_read, _zero3_init_flag,
    _flag_behind_the_script, _adapters_left_out, trainer_checks.unknown_arguments, _eight_bits_under_fsdp,
)  # fmt: skip
