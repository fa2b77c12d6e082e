"""What Accelerator makes of the ranks' environment: distributed type, FSDP, DeepSpeed, parallelism, compilation.

`accelerate launch` has already merged its flags and its YAML into that environment (launch/accelerate.py); a Trainer reads the same
variables (accelerate 1.15 state.py:AcceleratorState.__init__).
"""

from __future__ import annotations

from launchguard.configs import fsdp, plugins, training_args
from launchguard.configs._sources import Sources
from launchguard.errors import InputError
from launchguard.job import Origin, Setting

_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def uses(sources: Sources, what: str) -> bool:
    """True when ACCELERATE_USE_<what> is on, for a loop that has an Accelerator, or a plugin of the script's turns it on."""
    if sources.loop in ("torch", "deepspeed"):
        return False
    if f"ACCELERATE_USE_{what}" in plugins.variables(sources):
        return True
    return sources.launch.environment.get(f"ACCELERATE_USE_{what}", "false").lower() == "true"


def apply(sources: Sources) -> None:
    """Put strategy, fsdp.* and compile from the environment; DeepSpeed is deepspeed_json's."""
    if uses(sources, "MEGATRON_LM"):
        raise InputError("Megatron-LM jobs are not modelled", where=str(fsdp.variable(sources, "ACCELERATE_USE_MEGATRON_LM", "").origin),
                         help="use FSDP, DeepSpeed or DDP, or launch it unguarded")  # fmt: skip
    if uses(sources, "FSDP"):
        fsdp.from_environment(sources)
    backend = fsdp.variable(sources, "ACCELERATE_DYNAMO_BACKEND", "NO")
    if str(backend.value).upper() != "NO" and sources.loop not in ("torch", "deepspeed"):
        argument = sources.launch.arguments.get("dynamo_backend")
        training_args.note_compile(sources, argument.origin if argument else backend.origin)
    argument = sources.launch.arguments.get("gradient_accumulation_steps")
    if argument is not None and argument.value is not None and not sources.is_trainer and uses(sources, "DEEPSPEED"):
        sources.settings.default("gradient_accumulation_steps", int(argument.value), argument.origin)
    if sources.launch.environment.get("ACCELERATE_MIXED_PRECISION") == "fp8" and sources.loop not in ("torch", "deepspeed"):
        origin = fsdp.variable(sources, "ACCELERATE_MIXED_PRECISION", "").origin
        sources.settings.note("LG310", "warning", "fp8 is not modelled: predicted as bf16", origin)


def apply_parallelism(sources: Sources) -> None:
    """parallelism_config (accelerate 1.15 parallelism_config.py): its product is the world size; FSDP shards over dp_shard x cp."""
    if not uses(sources, "PARALLELISM_CONFIG"):
        return
    sizes = {name: _size(sources, name) for name in _SIZES}
    where = str(sizes["dp_shard"].origin)
    product = 1
    for setting in sizes.values():
        product *= int(setting.value)
    world = sources.launch.world_size
    if product != world and int(sizes["sp"].value) == 1:
        parts = " x ".join(f"{name} {setting.value}" for name, setting in sizes.items() if setting.value != 1)
        raise InputError(f"parallelism_config makes {product} processes ({parts or 'all sizes 1'}), but {world} are launched",
                         where=where, help=f"make the product of the sizes {world}, or launch {product} processes",
                         code="LG250")  # fmt: skip
    if int(sizes["cp"].value) > 1 and int(sizes["sp"].value) > 1:
        raise InputError(
            "context and sequence parallelism exclude each other", where=where, help="set cp_size or sp_size to 1", code="LG250"
        )
    shard = int(sizes["dp_shard"].value) * int(sizes["cp"].value)
    strategy = sources.settings.get("strategy")
    if strategy == "fsdp2":
        if shard == 1:
            raise InputError("FSDP is on, but parallelism_config leaves no rank to shard over", where=where,
                             help="raise dp_shard_size")  # fmt: skip
        if shard != world:
            sources.settings.put("fsdp.shard_group_size", shard, sizes["dp_shard"].origin)
    for name in ("tp", "cp", "sp"):
        if int(sizes[name].value) > 1:
            message = f"{name}_size {sizes[name].value} is not modelled: predicted as if every rank ran the whole sequence and every layer"
            sources.settings.note("LG320", "warning", message, sizes[name].origin)


def _size(sources: Sources, name: str) -> Setting:
    setting = fsdp.variable(sources, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
    try:
        value = int(setting.value)
    except ValueError:
        value = 0
    if value < 1:
        raise InputError(
            f"parallelism_config_{name}_size is {setting.value}", where=str(setting.origin), help="give 1 or more", code="LG250"
        )
    return Setting(value, setting.origin)


def check_shard_groups(sources: Sources) -> None:
    """HYBRID_SHARD shards within a node and replicates across nodes (torch fsdp/_init_utils.py:_init_process_group_for_hybrid_shard)."""
    settings, launch = sources.settings, sources.launch
    if str(settings.get("fsdp.sharding_strategy", "")).startswith("HYBRID"):
        settings.default("fsdp.shard_group_size", launch.nproc_per_node, launch.world_size_origin)
    size = settings.get("fsdp.shard_group_size")
    if size and launch.world_size % int(size):
        origin = settings.origin("fsdp.shard_group_size") or Origin("fsdp")
        raise InputError(f"{launch.world_size} ranks cannot be divided into groups of {size}", where=str(origin),
                         help="use a group size that divides the world size")  # fmt: skip
