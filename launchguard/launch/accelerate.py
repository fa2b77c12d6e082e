"""`accelerate launch ...`: Accelerate's own parser, its merge with the config file, and the environment it gives to ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from launchguard.errors import InputError
from launchguard.installed import version_of
from launchguard.job import LaunchSpec, Note, Origin, Setting
from launchguard.launch import _parsers
from launchguard.launch._environment import environ, inherited
from launchguard.launch._gpus import local_gpus
from launchguard.launch.python import module_of

_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
_NO_SCRIPT = "<no script>"
_FROM_ENVIRONMENT_OF_NOBODY = ("OMP_NUM_THREADS", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY", "KMP_BLOCKTIME")


def matches(argv: Sequence[str]) -> bool:
    """accelerate launch, accelerate-launch, and the modules behind them."""
    return _launch_arguments(argv) is not None


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """The launch as accelerate/commands/launch.py:launch_command would do it, up to the point where it starts processes.

    num_processes is the total over all machines (utils/launch.py:prepare_multi_gpu_env); a command that ends in simple_launcher
    starts one process whatever num_processes says.
    """
    arguments = _launch_arguments(argv) or []
    launch = _parsers.library("accelerate.commands.launch", "accelerate")
    args = _parsers.without_exit(lambda: launch.launch_command_parser().parse_args(arguments), "accelerate launch")
    return _spec(launch, args, argv, env, cwd, gpus_per_node)


def from_config_file(path: str, env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """The launch that a config file alone describes, with no script."""
    launch = _parsers.library("accelerate.commands.launch", "accelerate")
    arguments = ["--config_file", path, _NO_SCRIPT]
    args = _parsers.without_exit(lambda: launch.launch_command_parser().parse_args(arguments), "accelerate launch")
    return _spec(launch, args, (), env, cwd, gpus_per_node)


def _launch_arguments(argv: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch` in any of its spellings; None for another command."""
    program = os.path.basename(argv[0])
    if program == "accelerate-launch":
        return list(argv[1:])
    if program == "accelerate" and argv[1:2] == ["launch"]:
        return list(argv[2:])
    module, rest = module_of(argv)
    if module == _MODULES[0]:
        return rest
    if module in (_MODULES[1], "accelerate") and rest[:1] == ["launch"]:
        return rest[1:]
    return None


def _spec(launch: Any, args: Any, argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None) -> LaunchSpec:
    config_file = _config_file(args, env, cwd)
    given = copy.copy(vars(args))
    typed = set(getattr(args, "nondefault", ()))
    origin = Origin("command line", "--num_processes") if given.get("num_processes") is not None else None
    if config_file is None and args.num_processes is None and not args.cpu:
        args.num_processes, origin = local_gpus(env, gpus_per_node, flag="--num_processes N")
    args.config_file = config_file
    with environ({}), _as_on_the_gpu_node(launch), _parsers.refusals("accelerate launch", _shown(config_file)):
        args, defaults, mixed_precision_from_file = launch._validate_launch_command(args)
    if config_file is None:
        args.multi_gpu = args.multi_gpu or _would_use_many_gpus(args)
    elif args.num_processes is None:
        args.num_processes, origin = local_gpus(env, gpus_per_node, flag="--num_processes N")
    settings = _arguments(args, given, typed, defaults, _as_written(config_file, cwd))
    with environ({}), _as_on_the_gpu_node(launch), _parsers.refusals("accelerate launch", _shown(config_file)):
        prepared = _rank_environment(launch, args, defaults, mixed_precision_from_file)
    nnodes, nproc, notes = _world(args)
    if config_file is not None and given.get("config_file") is None:
        notes += (Note("LG208", "info", "no --config_file: the user's default Accelerate config is in effect", config_file),)
    notes += _unused_keys(defaults, given, _as_written(config_file, cwd)) + _lost_keys(
        args, given, typed, defaults, _as_written(config_file, cwd)
    )
    script = None if args.training_script == _NO_SCRIPT else args.training_script
    return LaunchSpec(
        launcher="accelerate", argv=tuple(argv), cwd=cwd, script=script, script_args=tuple(args.training_script_args),
        is_module=bool(args.module), nnodes=nnodes, nproc_per_node=nproc, environment={**inherited(env), **prepared},
        arguments=settings, config_file=config_file, notes=notes, world_size_origin=origin or settings["num_processes"].origin,
    )  # fmt: skip


def _config_file(args: Any, env: Mapping[str, str], cwd: str) -> str | None:
    """The config file in effect: --config_file, else the user's cached default (commands/config/config_args.py:default_config_file)."""
    if args.config_file is not None:
        path = os.path.join(cwd, os.path.expanduser(args.config_file))
        if not os.path.isfile(path):
            raise InputError(f"no Accelerate config at {args.config_file}", where="accelerate launch --config_file",
                             help="correct the path; accelerate config writes one", code="LG250")  # fmt: skip
        return path
    home = env.get("HOME", os.path.expanduser("~"))
    cache = env.get("HF_HOME", os.path.join(env.get("XDG_CACHE_HOME", os.path.join(home, ".cache")), "huggingface"))
    default = os.path.join(cache.replace("~", home, 1) if cache.startswith("~") else cache, "accelerate", "default_config.yaml")
    return default if os.path.isfile(default) and not args.cpu else None


@contextmanager
def _as_on_the_gpu_node(launch: Any) -> Iterator[None]:
    """Answers of a node with GPUs where Accelerate probes this one, and no probing of ports (utils/launch.py)."""
    utils = _parsers.library("accelerate.utils.launch", "accelerate")
    answers = [
        (launch, "default_config_file", ""),  # _config_file has already found it, under the job's own HF_HOME
        (launch, "is_bf16_available", lambda *_: True),
        (utils, "is_fp8_available", lambda: True),
        (utils, "is_port_in_use", lambda *_: False),
        (utils, "get_free_port", lambda: 29500),
    ]
    with ExitStack() as stack:
        for module, name, answer in answers:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, answer))
        stack.enter_context(mock.patch.object(launch.logger, "warning", lambda *_, **__: None))
        yield


def _would_use_many_gpus(args: Any) -> bool:
    """Without a config file _validate_launch_command turns multi_gpu on when it sees more than one GPU; the job's node has them."""
    other = args.cpu or args.tpu or args.use_deepspeed or args.use_fsdp or args.use_megatron_lm
    return not other and args.num_processes > 1


def _rank_environment(launch: Any, args: Any, defaults: Any, mixed_precision_from_file: bool) -> dict[str, str]:
    """What the chosen launcher function puts into the environment of every rank (commands/launch.py:launch_command)."""
    args = copy.copy(args)
    utils = _parsers.library("accelerate.utils.launch", "accelerate")
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config) if defaults else []
        args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * mixed_precision_from_file)
        _, prepared = utils.prepare_deepspeed_cmd_env(args)
    elif _starts_many(args):
        prepared = utils.prepare_multi_gpu_env(args)
    else:
        args.mpirun_hostfile = None  # asking mpirun for its version would start a process
        _, prepared = utils.prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in prepared.items() if name not in _FROM_ENVIRONMENT_OF_NOBODY}


def _unused_keys(defaults: Any, given: Mapping[str, Any], config_file: str | None) -> tuple[Note, ...]:
    """Keys of the config file's sections that no argument of `accelerate launch` takes; Accelerate ignores them in silence."""
    unused = [key for name, (key, _) in _config_keys(defaults).items() if "." in key and name not in given] if defaults is not None else []
    known = ("fsdp_ignored_modules", "deepspeed_moe_layer_cls_names")  # read with getattr, without a flag
    return tuple(Note("LG225", "warning", f"accelerate launch does not know {key} and ignores it", f"{config_file}:{key}")
                 for key in unused if key.rpartition(".")[2] not in known)  # fmt: skip


def _lost_keys(args: Any, given: Mapping[str, Any], typed: set[str], defaults: Any, config_file: str | None) -> tuple[Note, ...]:
    """Keys of the config file that a typed flag replaced, and FSDP keys that stand there without their prefix, which accelerate adds
    (commands/launch.py:_validate_launch_command)."""
    notes = []
    for name, (key, value) in (_config_keys(defaults) if defaults is not None else {}).items():
        used = getattr(args, name, value)
        if name in typed and used != value and key != "distributed_type":
            notes.append(Note("LG209", "info", f"{name} is {used} (command line), not {value} ({config_file}:{key})", "command line"))
        if key.startswith("fsdp_config.") and not key.removeprefix("fsdp_config.").startswith("fsdp") and name in given:
            notes.append(Note("LG234", "info", f"{key} is read as {name}: accelerate adds the prefix", f"{config_file}:{key}"))
    return tuple(notes)


def _starts_many(args: Any) -> bool:
    """commands/launch.py:launch_command: which jobs do not end in simple_launcher."""
    return not args.cpu and bool(args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.multi_gpu)


def _world(args: Any) -> tuple[int, int, tuple[Note, ...]]:
    """(machines, processes per machine, notes)."""
    machines, total = _count(args, "num_machines"), _count(args, "num_processes")
    if args.tpu:
        raise InputError("TPU jobs are not modelled", where="accelerate launch --tpu", help="launchguard predicts CUDA GPUs")
    if not _starts_many(args):
        if total * machines == 1 or args.mpirun_hostfile is not None:
            return machines, max(1, total // machines), ()
        message = f"num_processes is {total}, but without a distributed type accelerate launch starts one process"
        return 1, 1, (Note("LG206", "warning", message, "accelerate launch"),)
    if total % machines:
        message = f"num_processes {total} is not a multiple of num_machines {machines}; each machine starts {total // machines}"
        notes: tuple[Note, ...] = (Note("LG207", "warning", message, "accelerate launch"),)
    else:
        notes = ()
    if total < machines:
        raise InputError(f"num_processes {total} is the total over machines, and there are {machines} machines",
                         where="accelerate launch --num_processes", help=f"give at least {machines}", code="LG250")  # fmt: skip
    return machines, total // machines, notes


def _count(args: Any, name: str) -> int:
    """A number of the config file, whose values no parser has looked at; torchrun gets it as text, and refuses what is none."""
    value = getattr(args, name) or 1
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} is {value!r}, not a whole number", where=f"accelerate launch --{name}", help="write 1 or more",
                         code="LG250") from None  # fmt: skip


def _arguments(args: Any, given: Mapping[str, Any], typed: set[str], defaults: Any, config_file: str | None) -> dict[str, Setting]:
    """Accelerate's resolved namespace with origins: typed flag, key of the config file, or the library's default."""
    default = f"default of accelerate {version_of('accelerate')}"
    keys = _config_keys(defaults) if defaults is not None else {}
    settings = {}
    for name, value in vars(args).items():
        if name in ("training_script", "training_script_args", "nondefault"):
            continue
        from_file = name in keys and keys[name][1] == value and (name not in typed or given.get(name) != value)
        if name in typed and not from_file:
            origin = Origin("command line", f"--{name}")
        elif from_file and config_file is not None:
            origin = Origin(config_file, keys[name][0])
        else:
            origin = Origin(default, f"--{name}")
        settings[name] = Setting(value, origin)
    return settings


def _config_keys(defaults: Any) -> dict[str, tuple[str, Any]]:
    """Argument name -> (dotted key of the config file, value); sections get their prefix as _validate_launch_command gives it."""
    prefixes = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
    keys: dict[str, tuple[str, Any]] = {}
    for name, value in vars(defaults).items():
        if isinstance(value, dict):
            prefix = prefixes.get(name, "")
            for key, entry in value.items():
                full = key if not prefix or key.startswith(prefix.rstrip("_")) else prefix + key
                keys[full] = (f"{name}.{key}", entry)
        elif value is not None:
            keys[name] = (name, value)
    kind = getattr(defaults.distributed_type, "value", defaults.distributed_type)
    for flag, kinds in (("use_deepspeed", ("DEEPSPEED",)), ("use_fsdp", ("FSDP",)), ("multi_gpu", ("MULTI_GPU",))):
        keys[flag] = ("distributed_type", kind in kinds)
    return keys


def _as_written(config_file: str | None, cwd: str) -> str | None:
    """The config file's path as short as the user would write it."""
    if config_file is None:
        return None
    relative = os.path.relpath(config_file, cwd)
    return config_file if relative.startswith("..") else relative


def _shown(config_file: str | None) -> str:
    return config_file or "accelerate launch"
