"""argv + env -> LaunchSpec: what a launch command starts, read the way its own launcher reads it.

One file per launcher; each has `matches(argv) -> bool` and `parse(argv, env, cwd, gpus_per_node=None) -> LaunchSpec`. A launcher's file
calls the argument parser of the installed library (imported lazily), starts nothing, opens no port and leaves os.environ as it was.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from launchguard import registry
from launchguard.errors import InputError
from launchguard.job import LaunchSpec, Note, Origin
from launchguard.launch._environment import inherited
from launchguard.launch._gpus import device_notes, local_gpus, visible_devices

_FALLBACK = "python"  # any interpreter; it must not take `python -m torch.distributed.run` from torchrun
_WRAPPERS = frozenset({"env", "nohup", "exec", "time", "nice"})
_OWN_FLAGS = {  # flags that decide the world, as argparse destinations with their dashes made underscores
    "accelerate": ("__num_processes", "__num_machines", "__multi_gpu", "__use_fsdp", "__use_deepspeed", "__zero_stage", "__gpu_ids"),
    "torchrun": ("__nproc_per_node", "__nnodes", "__node_rank"),
    "deepspeed": ("__num_gpus", "__num_nodes", "__hostfile", "__include", "__exclude"),
}
_RUNNERS = {"uv": "run", "poetry": "run", "pdm": "run", "pipenv": "run"}


def launchers() -> tuple[str, ...]:
    """Names of the known launchers, in the order in which they are asked."""
    return tuple(sorted(registry.names("launch"), key=lambda name: (name == _FALLBACK, name)))


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """The LaunchSpec of a launch command.

    gpus_per_node: GPUs of each node of the job, where the command leaves the number to the machine it starts on; None: count the
    GPUs of this machine. Raises InputError for a command that no launcher knows, or that its launcher would refuse.
    """
    if not argv:
        raise InputError(
            "no launch command given", where="command line", help="launchguard check -- torchrun --nproc_per_node 8 train.py ..."
        )
    command, assigned, wrapper = _unwrap(argv)
    whole_env = {**env, **assigned}
    for name in launchers():
        launcher = registry.load("launch", name)
        if command and launcher.matches(command):
            launch = launcher.parse(command, whole_env, cwd, gpus_per_node)
            notes = launch.notes + (() if name == "srun" else _misplaced(launch) + _devices(launch, gpus_per_node))
            if wrapper:
                notes += (Note("LG201", "info", f"read past {' '.join(wrapper)!r}, which does not change what is launched", wrapper[0]),)
            return dataclasses.replace(launch, argv=tuple(argv), notes=notes)
    raise InputError(
        f"unknown launcher {os.path.basename(command[0] if command else argv[0])!r}", where=" ".join(argv[:4]),
        help=f"known: {', '.join(launchers())} (accelerate launch ..., deepspeed ..., torchrun ..., python [-m] ...)",
    )  # fmt: skip


def without_command(
    env: Mapping[str, str], cwd: str, *, accelerate_config: str | None = None, gpus_per_node: int | None = None, nnodes: int = 1
) -> LaunchSpec:
    """The LaunchSpec of a check from files alone: the world of an Accelerate config, else nnodes x gpus_per_node (or this node's GPUs)."""
    if accelerate_config is not None:
        from launchguard.launch import accelerate

        return accelerate.from_config_file(accelerate_config, env, cwd, gpus_per_node)
    gpus, origin = local_gpus(env, gpus_per_node, flag="--gpus-per-node")
    return LaunchSpec(launcher="none", argv=(), cwd=cwd, script=None, nnodes=nnodes, nproc_per_node=gpus,
                      environment=inherited(env), world_size_origin=origin)  # fmt: skip


def _devices(launch: LaunchSpec, gpus_per_node: int | None) -> tuple[Note, ...]:
    """Which GPUs the ranks of a node get: CUDA_VISIBLE_DEVICES as the launcher hands it to them."""
    devices = visible_devices(launch.environment) or None  # an empty variable hides the GPUs of this machine, not of the job's
    argument = launch.arguments.get("gpu_ids") or launch.arguments.get("include")
    chosen = argument is not None and str(argument.value or "all") != "all" and not argument.origin.source.startswith("default")
    origin = argument.origin if chosen and argument is not None else Origin("environment", "CUDA_VISIBLE_DEVICES")
    where = origin if devices is not None else launch.world_size_origin
    return device_notes(launch.nproc_per_node, devices, gpus_per_node, where) + _idle(launch, len(devices) if devices else gpus_per_node)


def _idle(launch: LaunchSpec, gpus: int | None) -> tuple[Note, ...]:
    """One process where the launcher could start one for each GPU: its YAML or default says so, and the other GPUs stay idle."""
    on_cpu = launch.arguments.get("cpu")
    told = any(note.code == "LG206" for note in launch.notes) or (on_cpu is not None and on_cpu.value)
    if launch.launcher == "python" or launch.world_size > 1 or gpus is None or gpus < 2 or told:
        return ()
    severity = "info" if launch.world_size_origin.source == "command line" else "warning"
    message = f"one process on a node of {gpus} GPUs: the others stay idle, and nothing is shared or sharded"
    return (Note("LG215", severity, message, str(launch.world_size_origin)),)


def _misplaced(launch: LaunchSpec) -> tuple[Note, ...]:
    """The launcher's own flags behind the script: they go to the script, and the launcher never sees them."""
    found = [
        word.split("=")[0] for word in launch.script_args if word.split("=")[0].replace("-", "_") in _OWN_FLAGS.get(launch.launcher, ())
    ]
    message = "{} stands behind the script, so it is the script's argument and " + launch.launcher + " does not see it"
    return tuple(Note("LG216", "warning", message.format(flag), f"command line:{flag}") for flag in found)


def _unwrap(argv: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """(command, environment assignments, wrapper words) of `env A=1 nohup uv run torchrun ...`."""
    rest, assigned, wrapper = list(argv), {}, []
    while rest:
        word = rest[0]
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            assigned[name] = value
            taken = 1
        elif os.path.basename(word) in _WRAPPERS:
            taken = 1
        elif _RUNNERS.get(os.path.basename(word)) == (rest[1] if len(rest) > 1 else ""):
            taken = 2
        else:
            break
        wrapper += rest[:taken]
        rest = rest[taken:]
    return rest, assigned, wrapper
