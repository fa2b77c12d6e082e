"""`deepspeed [options] script.py ...`, read by deepspeed.launcher.runner's own functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from launchguard.errors import InputError
from launchguard.installed import version_of
from launchguard.job import LaunchSpec, Note, Origin, Setting
from launchguard.launch import _parsers
from launchguard.launch._environment import environ, inherited
from launchguard.launch._gpus import count_gpus, local_gpus, nvml_gpus, visible_devices
from launchguard.launch.python import module_of

_MODULES = ("deepspeed.launcher.runner", "deepspeed")


def matches(argv: Sequence[str]) -> bool:
    """deepspeed (or its short name ds) under any path, or the module behind it."""
    return os.path.basename(argv[0]) in ("deepspeed", "deepspeed.pt") or module_of(argv)[0] in _MODULES


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """World size as deepspeed/launcher/runner.py:main resolves hostfile, --include/--exclude, --num_nodes and --num_gpus.

    The ssh checks, the port and the autotuner of that function are left out. Ranks get --local_rank as an argument.
    """
    module, module_args = module_of(argv)
    arguments = module_args if module else list(argv[1:])
    runner = load_runner(env)
    args = _parsers.without_exit(lambda: runner.parse_args(arguments), "deepspeed")
    active, origin, notes = _resources(runner, args, env, cwd, gpus_per_node)
    slots = {len(used) for used in active.values()}
    if not active:
        raise InputError("--include/--exclude leave no GPU to run on", where="deepspeed", help="name at least one host and slot")
    if len(slots) > 1:
        uneven = ", ".join(f"{host}: {len(used)}" for host, used in active.items())
        raise InputError(f"nodes with different numbers of GPUs cannot be modelled ({uneven})", where=_resource_flag(args),
                         help="use the same number of GPUs on every node")  # fmt: skip
    if args.autotuning:
        notes += (Note("LG301", "warning", "the autotuner changes the configuration while it runs; only the given one is predicted",
                       "--autotuning"),)  # fmt: skip
    default = f"default of deepspeed {version_of('deepspeed')}"
    settings = {name: Setting(value, Origin("command line" if _stated(arguments, name) else default, f"--{name}"))
                for name, value in vars(args).items() if name not in ("user_script", "user_args")}  # fmt: skip
    return LaunchSpec(
        launcher="deepspeed", argv=tuple(argv), cwd=cwd, script=args.user_script, script_args=tuple(args.user_args),
        is_module=bool(args.module), nnodes=len(active), nproc_per_node=slots.pop(),
        environment={**inherited(env), **_visible(active)}, arguments=settings,
        notes=notes, world_size_origin=origin,
    )  # fmt: skip


def _visible(active: Mapping[str, list[int]]) -> dict[str, str]:
    """deepspeed/launcher/launch.py:main gives every rank the slots of its node; those of the first node stand for all."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot) for slot in next(iter(active.values())))}


def load_runner(env: Mapping[str, str]) -> Any:
    """deepspeed.launcher.runner; its import probes for an accelerator, so DS_ACCELERATOR is cpu meanwhile unless it is set."""
    with environ({**os.environ, "DS_ACCELERATOR": env.get("DS_ACCELERATOR", "cpu")}), _parsers.refusals("deepspeed"):
        return _parsers.library("deepspeed.launcher.runner", "deepspeed")


def _resources(
    runner: Any, args: Any, env: Mapping[str, str], cwd: str, gpus_per_node: int | None
) -> tuple[Mapping[str, list[int]], Origin, tuple[Note, ...]]:
    """(host -> slots used, origin of the number, notes), rule for rule what runner.main does before it starts anything."""
    hostfile = os.path.join(cwd, args.hostfile)
    if not os.path.isfile(hostfile) and args.hostfile != runner.DLTS_HOSTFILE:
        raise InputError(f"no hostfile at {args.hostfile}: deepspeed would silently use this node alone", where="deepspeed --hostfile",
                         help="correct the path or drop --hostfile")  # fmt: skip
    with _parsers.refusals("deepspeed", args.hostfile):
        pool = runner.fetch_hostfile(hostfile) if os.path.isfile(hostfile) else None
    filtered = bool(args.include or args.exclude)
    if filtered and (args.num_nodes >= 0 or args.num_gpus >= 0):
        raise InputError("--num_nodes and --num_gpus cannot be given with --include and --exclude", where=_resource_flag(args),
                         help="keep one of the two ways", code="LG250")  # fmt: skip
    notes: tuple[Note, ...] = ()
    origin = Origin("command line", _resource_flag(args)) if filtered or args.num_gpus > 0 else Origin(args.hostfile, "slots")
    if not pool:
        if args.num_nodes > 1:
            raise InputError(f"--num_nodes {args.num_nodes}, but there is no hostfile at {args.hostfile}", where="deepspeed --num_nodes",
                             help="name the nodes: --hostfile FILE with lines like 'worker-0 slots=8'")  # fmt: skip
        pool, origin, notes = _this_node(args, env, gpus_per_node, origin)
    with _parsers.refusals("deepspeed", str(origin), code="LG260"):
        active = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
        active = runner.apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    return active, origin, notes


def _this_node(
    args: Any, env: Mapping[str, str], gpus_per_node: int | None, origin: Origin
) -> tuple[dict[str, int], Origin, tuple[Note, ...]]:
    """The resource pool without a hostfile. CUDA_VISIBLE_DEVICES counts only when no other flag chooses the GPUs."""
    visible = visible_devices(env)
    if args.num_gpus > 0:
        notes = (_ignored(visible),) if visible is not None else ()
        return {"localhost": args.num_gpus}, origin, notes
    if args.include or args.exclude:
        gpus = gpus_per_node or count_gpus({})[0] or _highest_slot(args.include) + 1
        if args.exclude and gpus <= 0:
            gpus, _ = local_gpus(env, None, flag="--include localhost:0,1,...")
        return {"localhost": gpus}, origin, ((_ignored(visible),) if visible is not None else ())
    if visible:
        args.include = f"localhost:{','.join(visible)}"  # runner.main: the variable becomes --include, checked against the node's GPUs
        return (
            {"localhost": gpus_per_node or nvml_gpus() or _highest_slot(args.include) + 1},
            Origin("environment", "CUDA_VISIBLE_DEVICES"),
            (),
        )
    gpus, origin = local_gpus(env, gpus_per_node, flag="--num_gpus N")
    return {"localhost": gpus}, origin, ()


def _ignored(visible: list[str]) -> Note:
    message = f"deepspeed ignores CUDA_VISIBLE_DEVICES={','.join(visible)} because the launch line chooses the GPUs itself"
    return Note("LG205", "warning", message, "environment:CUDA_VISIBLE_DEVICES")


def _highest_slot(include: str) -> int:
    """Largest slot number named in an --include text; -1 when it names whole hosts only."""
    slots = [int(slot) for spec in include.split("@") if ":" in spec for slot in spec.split(":")[1].split(",") if slot.isdigit()]
    return max(slots, default=-1)


def _resource_flag(args: Any) -> str:
    if args.include:
        return f"--include {args.include}"
    if args.exclude:
        return f"--exclude {args.exclude}"
    return "--num_gpus" if args.num_gpus > 0 else "--hostfile"


def _stated(arguments: Sequence[str], name: str) -> bool:
    return any(word.split("=")[0] == f"--{name}" for word in arguments)
