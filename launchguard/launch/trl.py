"""`trl sft ...`, `trl dpo ...`: TRL's program, which gives its own script and all arguments that the script does not take to
`accelerate launch` (trl 1.16 cli/commands/training.py:TrainingCommand.run, cli/accelerate_config.py)."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence

from launchguard.errors import InputError
from launchguard.job import LaunchSpec
from launchguard.launch import _parsers, accelerate

_SCRIPTS = ("sft", "dpo", "grpo", "kto", "reward", "rloo", "gkd", "online_dpo", "cpo", "orpo")
_PRESET = "accelerate_config"
_BOTH = frozenset({"debug", "use_cpu", "cpu", "seed", "help", "module"})  # the script's arguments have these names too, and it comes first


def matches(argv: Sequence[str]) -> bool:
    """trl under any path."""
    return os.path.basename(argv[0]) == "trl"


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """The `accelerate launch` behind it. Arguments of the launcher may stand in the script's --config file too."""
    if len(argv) < 2 or argv[1] not in _SCRIPTS:
        raise InputError(f"{' '.join(argv[:2])} trains nothing", where=" ".join(argv[:2]), help=f"one of {', '.join(_SCRIPTS[:5])}")
    flags = _launcher_flags()
    launching, script = [], []  # type: list[str], list[str]
    config = ""
    for flag, words in _groups(argv[2:]):
        name = flag.split("=")[0].lstrip("-").replace("-", "_")
        own = name == _PRESET or name in flags
        (launching if own else script).extend(words)
        config = (flag.partition("=")[2] or (words[1] if len(words) > 1 else "")) if name == "config" else config
    launching = [*_from_config(config, cwd, flags), *launching]
    line = ["accelerate", "launch", *_resolved(launching, cwd), "-m", f"trl.scripts.{argv[1]}", *script]
    return dataclasses.replace(accelerate.parse(line, env, cwd, gpus_per_node), argv=tuple(argv))


def _launcher_flags() -> frozenset[str]:
    launch = _parsers.library("accelerate.commands.launch", "accelerate")
    options = {option for action in launch.launch_command_parser()._actions for option in action.option_strings}
    return frozenset(option.lstrip("-").replace("-", "_") for option in options if option.startswith("--")) - _BOTH


def _groups(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, the flag and its values)."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group[0], group
            group = []
        group.append(word)
    if group:
        yield group[0], group


def _from_config(name: str, cwd: str, flags: frozenset[str]) -> list[str]:
    """The launcher's arguments among the keys of the script's config file; what is wrong with the file is for its reader to say."""
    import yaml

    try:
        with open(os.path.join(cwd, os.path.expanduser(name)), encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    found = content.items() if isinstance(content, dict) else ()
    return [word for key, value in found if key == _PRESET or key in flags for word in (f"--{key}", str(value))]


def _resolved(words: Sequence[str], cwd: str) -> list[str]:
    """--accelerate_config NAME -> --config_file PATH: a file, else one of the configs in the trl package."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"--{_PRESET}=") else [word])]
    if f"--{_PRESET}" not in words:
        return words
    at = words.index(f"--{_PRESET}")
    name = words[at + 1] if at + 1 < len(words) else ""
    path = os.path.join(cwd, name)
    spec = importlib.util.find_spec("trl")
    if not os.path.isfile(path):
        path = os.path.join((spec.submodule_search_locations or [""])[0] if spec else "", "accelerate_configs", f"{name}.yaml")
    if not name or not os.path.isfile(path):
        raise InputError(f"Accelerate config {name} is neither a file nor a config of the trl package", where=f"trl --{_PRESET}",
                         help="zero1, zero2, zero3, fsdp1, fsdp2, multi_gpu, single_gpu, or a path", code="LG250")  # fmt: skip
    return ["--config_file", path, *words[:at], *words[at + 2 :]]
