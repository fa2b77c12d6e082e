"""`llamafactory-cli train config.yaml`: LLaMA-Factory's program, which starts torchrun itself when it sees more than one GPU.

Read in LLaMA-Factory 0.9, src/llamafactory/cli.py and launcher.py: the number of processes is NPROC_PER_NODE, else the GPUs that it sees.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from launchguard.errors import InputError
from launchguard.job import LaunchSpec, Origin
from launchguard.launch import python, torchrun
from launchguard.launch._gpus import local_gpus

_PROGRAMS = ("llamafactory-cli", "lmf")
_MODULE = "llamafactory.launcher"
_TRUE = ("true", "y", "1")  # LLaMA-Factory's extras/misc.py:is_env_enabled


def matches(argv: Sequence[str]) -> bool:
    """llamafactory-cli under any path, its short name, or the module behind it."""
    return os.path.basename(argv[0]) in _PROGRAMS or python.module_of(argv)[0] == "llamafactory.cli"


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """torchrun over the node's GPUs with FORCE_TORCHRUN or more than one GPU, else one process."""
    module, rest = python.module_of(argv)
    words = list(rest) if module else list(argv[1:])
    if words[:1] != ["train"]:
        raise InputError(f"llamafactory-cli {words[0] if words else ''} trains nothing".replace("  ", " "), where=" ".join(argv[:2]),
                         help="llamafactory-cli train config.yaml")  # fmt: skip
    forced = env.get("FORCE_TORCHRUN", "").lower() in _TRUE
    stated = env.get("NPROC_PER_NODE")
    gpus, origin = (int(stated), Origin("environment", "NPROC_PER_NODE")) if stated and stated.isdigit() else (None, None)
    if not forced or gpus is None:
        seen, seen_origin = local_gpus(env, gpus_per_node, flag="NPROC_PER_NODE=N")
        if not forced and seen == 1:
            return dataclasses.replace(python.parse(["python", "-m", _MODULE, *words[1:]], env, cwd, gpus_per_node), argv=tuple(argv))
        gpus, origin = (seen, seen_origin) if gpus is None else (gpus, origin)
    line = ["torchrun", "--nnodes", env.get("NNODES", "1"), "--node_rank", env.get("NODE_RANK", "0"), "--nproc_per_node", str(gpus),
            "--master_addr", env.get("MASTER_ADDR", "127.0.0.1"), "-m", _MODULE, *words[1:]]  # fmt: skip
    spec = torchrun.parse(line, env, cwd, gpus_per_node)
    return dataclasses.replace(spec, argv=tuple(argv), world_size_origin=origin or spec.world_size_origin)
