"""`axolotl train config.yml`: axolotl's program, which puts `accelerate launch` or torchrun before its own module.

Read in axolotl 0.12, src/axolotl/cli/main.py and cli/utils/train.py: arguments behind `--` go to the launcher, num_processes and
main_process_port too.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from launchguard.errors import InputError
from launchguard.job import LaunchSpec
from launchguard.launch import accelerate, python, torchrun

_MODULE = "axolotl.cli.train"
_FORWARDED = ("num_processes", "main_process_port")
_TRAINS = ("train",)


def matches(argv: Sequence[str]) -> bool:
    """axolotl under any path."""
    return os.path.basename(argv[0]) == "axolotl"


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """The launch behind it: accelerate unless --launcher says torchrun or python."""
    words = list(argv[1:])
    if words[:1] != list(_TRAINS):
        raise InputError(f"axolotl {words[0] if words else ''} trains nothing".replace("  ", " "), where=" ".join(argv[:2]),
                         help="axolotl train config.yml")  # fmt: skip
    end = words.index("--") if "--" in words else len(words)
    launcher, forwarded, rest = _split(words[1:end])
    behind = words[end + 1 :]
    if launcher == "python":
        spec = python.parse(["python", "-m", _MODULE, *rest], env, cwd, gpus_per_node)
    elif launcher == "torchrun":
        spec = torchrun.parse(["torchrun", *behind, "-m", _MODULE, *rest], env, cwd, gpus_per_node)
    else:
        spec = accelerate.parse(["accelerate", "launch", *forwarded, *behind, "-m", _MODULE, *rest], env, cwd, gpus_per_node)
    return dataclasses.replace(spec, argv=tuple(argv))


def _split(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """(launcher, what accelerate launch gets, what the module gets)."""
    launcher, forwarded, rest = "accelerate", [], []  # type: str, list[str], list[str]
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        name = flag.lstrip("-").replace("-", "_") if flag.startswith("--") else ""
        if name in ("launcher", *_FORWARDED):
            if not equals:
                at += 1
                value = words[at] if at < len(words) else ""
            if name == "launcher":
                launcher = value
            else:
                forwarded += [f"--{name}", value]
        elif name not in ("accelerate", "no_accelerate"):
            rest.append(words[at])
        else:
            launcher = "accelerate" if name == "accelerate" else "python"
        at += 1
    return launcher, forwarded, rest
