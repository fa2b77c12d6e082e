"""`python [options] script.py ...` and `python [options] -m module ...`: one process, or one of many started by srun or torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from launchguard.errors import InputError
from launchguard.job import LaunchSpec, Origin
from launchguard.launch._environment import inherited
from launchguard.launch._gpus import count_gpus

_INTERPRETER = re.compile(r"^(python|pypy)[0-9.]*$")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # CPython's options that take a separate value


def is_interpreter(word: str) -> bool:
    """True for python, python3, /opt/x/bin/python3.11."""
    return bool(_INTERPRETER.match(os.path.basename(word)))


def module_of(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """(module, its arguments) of `python [options] -m module ...`; (None, []) for any other command."""
    if not argv or not is_interpreter(argv[0]):
        return None, []
    target, rest, is_module = _target(argv)
    return (target, rest) if is_module else (None, [])


def matches(argv: Sequence[str]) -> bool:
    """A Python interpreter, or a script that is run directly."""
    return is_interpreter(argv[0]) or argv[0].endswith(".py")


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """One process per command, unless WORLD_SIZE and RANK say that something outside starts this command once per rank."""
    if is_interpreter(argv[0]):
        script, rest, is_module = _target(argv)
    else:
        script, rest, is_module = argv[0], list(argv[1:]), False
    if script is None or script in ("-", "-c"):
        raise InputError("the python command runs no script that can be read", where=" ".join(argv[:3]),
                         help="give a script.py or -m module")  # fmt: skip
    nnodes, nproc, origin = _world(env)
    return LaunchSpec(
        launcher="python", argv=tuple(argv), cwd=cwd, script=script, script_args=tuple(rest), is_module=is_module, nnodes=nnodes,
        nproc_per_node=nproc, environment=inherited(env), gpus_in_sight=max(1, count_gpus(env, gpus_per_node)[0]), world_size_origin=origin,
    )  # fmt: skip


def _target(argv: Sequence[str]) -> tuple[str | None, list[str], bool]:
    """(script or module, its arguments, is it a module) behind the interpreter's own options."""
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "-c":
            return "-c", list(argv[at + 1 :]), False
        if word == "-m" or (re.fullmatch(r"-[A-Za-z]*m", word) and not word.startswith("--")):
            return (argv[at + 1] if at + 1 < len(argv) else None), list(argv[at + 2 :]), True
        if word in _WITH_VALUE:
            at += 2
        elif word.startswith("-") and word != "-":
            at += 1
        else:
            return word, list(argv[at + 1 :]), False
    return None, [], False


def _world(env: Mapping[str, str]) -> tuple[int, int, Origin]:
    """(nodes, processes per node, origin) from the variables of torch's env:// rendezvous."""
    if "WORLD_SIZE" not in env or "RANK" not in env:
        return 1, 1, Origin("python", "one process")
    world = _integer(env, "WORLD_SIZE")
    local = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world
    if world < 1 or local < 1 or world % local:
        raise InputError(f"WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={local}", where="environment WORLD_SIZE",
                         help="unset the variables of a launcher that is not used here")  # fmt: skip
    return world // local, local, Origin("environment", "WORLD_SIZE")


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise InputError(f"{name}={env[name]!r} is not a number", where=f"environment {name}", help=f"unset {name}") from None
