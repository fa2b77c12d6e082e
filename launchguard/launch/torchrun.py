"""`torchrun`, `python -m torch.distributed.run` and `python -m torch.distributed.launch`, read by torch.distributed.run's own parser."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from launchguard.errors import InputError
from launchguard.installed import version_of
from launchguard.job import LaunchSpec, Note, Origin, Setting
from launchguard.launch import _parsers
from launchguard.launch._environment import environ, inherited
from launchguard.launch._gpus import count_gpus, local_gpus
from launchguard.launch.python import module_of

_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def matches(argv: Sequence[str]) -> bool:
    """torchrun under any path, or its module."""
    return os.path.basename(argv[0]) == "torchrun" or module_of(argv)[0] in _MODULES


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """World size is nnodes (its maximum when a range) x nproc_per_node, as torch/distributed/run.py:config_from_args has it."""
    module, module_args = module_of(argv)
    arguments = module_args if module else list(argv[1:])
    run = _parsers.library("torch.distributed.run", "torch")
    with environ(env):  # the parser takes PET_* variables as defaults
        args = _parsers.without_exit(lambda: _parser(run, module).parse_args(arguments), "torchrun")
    nproc, origin, notes = _nproc(str(args.nproc_per_node), env, gpus_per_node, _stated(arguments, "nproc"))
    with _parsers.refusals("torchrun", "--nnodes"):
        fewest, most = run.parse_min_max_nnodes(str(args.nnodes))
    if fewest != most:
        notes += (Note("LG202", "info", f"elastic job of {fewest} to {most} nodes: predicted for {most}", "--nnodes"),)
    if module == "torch.distributed.launch" and not args.use_env:
        notes += (Note("LG203", "info", "torch.distributed.launch adds --local-rank to the script's arguments", "--use-env"),)
    if not args.training_script:
        raise InputError("torchrun starts no script", where="torchrun", help="torchrun --nproc_per_node 8 train.py ...")
    default = f"default of torch {version_of('torch')}"
    settings = {name: Setting(value, Origin("command line" if _stated(arguments, name) else default, f"--{name}"))
                for name, value in vars(args).items() if not name.startswith("training_script")}  # fmt: skip
    return LaunchSpec(
        launcher="torchrun", argv=tuple(argv), cwd=cwd, script=args.training_script, script_args=tuple(args.training_script_args),
        is_module=bool(args.module), nnodes=most, nproc_per_node=nproc, environment=inherited(env), arguments=settings, notes=notes,
        world_size_origin=origin,
    )  # fmt: skip


def _parser(run: Any, module: str | None) -> Any:
    """torch/distributed/launch.py:parse_args adds one flag to torchrun's parser."""
    parser = run.get_args_parser()
    if module == "torch.distributed.launch":
        parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    return parser


def _nproc(text: str, env: Mapping[str, str], gpus_per_node: int | None, stated: bool) -> tuple[int, Origin, tuple[Note, ...]]:
    """(processes per node, origin, notes). "gpu" and "auto" mean the GPUs of the node the job will run on, not of this one."""
    flag = Origin("command line" if stated else f"default of torch {version_of('torch')}", "--nproc_per_node")
    if text.isdigit() and int(text) > 0:
        return int(text), flag, ()
    if text == "gpu" or (text == "auto" and count_gpus(env, gpus_per_node)[0] > 0):
        gpus, origin = local_gpus(env, gpus_per_node, flag="--nproc_per_node N")
        note = Note("LG204", "info", f"--nproc_per_node {text}: {gpus} processes per node ({origin})", "--nproc_per_node")
        return gpus, origin, (note,)
    if text == "cpu":
        note = Note("LG204", "warning", "--nproc_per_node cpu: ranks without a GPU are not modelled", "--nproc_per_node")
        return os.cpu_count() or 1, flag, (note,)
    raise InputError(f"--nproc_per_node {text}: not a number of processes that can be told here", where="torchrun --nproc_per_node",
                     help="give a number, or launchguard's --gpus-per-node N")  # fmt: skip


def _stated(arguments: Sequence[str], name: str) -> bool:
    dashed = name.replace("_", "-")
    return any(word.lstrip("-").split("=")[0].replace("_", "-").startswith(dashed) for word in arguments if word.startswith("--"))
