"""Reading the user's JSON and YAML files, with the file and line in every refusal."""

from __future__ import annotations

import json
import os
from typing import Any

from launchguard.errors import InputError

_CODES = {"DeepSpeed config": "LG251", "FSDP config": "LG261", "fsdp_config": "LG261"}  # role of a file -> who refuses it


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """deepspeed/runtime/config_utils.py:dict_raise_error_on_duplicate_keys."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateKey(key)
        seen[key] = value
    return seen


def resolve_path(name: str, cwd: str) -> str:
    """Absolute path of a file as a rank started in cwd would find it."""
    return os.path.join(cwd, os.path.expanduser(name))


def read_text(name: str, cwd: str, what: str) -> str:
    """Text of a file. what: its role, for the message ("DeepSpeed config")."""
    path = resolve_path(name, cwd)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"the {what} {name} does not exist", where=name, help=f"looked for {path}",
                         code=_CODES.get(what, "")) from None  # fmt: skip
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} {name} cannot be read ({error})", where=name, help="check the path and its permissions") from error


def parse_json(text: str, name: str, what: str) -> dict[str, Any]:
    """A JSON object. Duplicate keys are refused, as DeepSpeed refuses them."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise InputError(f"the key {error} stands twice in the {what}", where=name, help="keep one of them",
                         code=_CODES.get(what, "")) from None  # fmt: skip
    except json.JSONDecodeError as error:
        raise InputError(f"the {what} is not valid JSON: {error.msg.lower()}", where=f"{name}:{error.lineno}:{error.colno}",
                         help="correct the syntax at that place", code=_CODES.get(what, "")) from None  # fmt: skip
    return _object(value, name, what)


def parse_yaml(text: str, name: str, what: str) -> dict[str, Any]:
    """A YAML mapping; an empty document is an empty one."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError(f"the {what} is not valid YAML: {problem}", where=place, help="correct the syntax at that place") from None
    return {} if value is None else _object(value, name, what)


def read_mapping(name: str, cwd: str, what: str) -> dict[str, Any]:
    """A mapping from a .json file, or from YAML under any other name."""
    text = read_text(name, cwd, what)
    return parse_json(text, name, what) if name.endswith(".json") else parse_yaml(text, name, what)


def _object(value: Any, name: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"the {what} holds a {type(value).__name__}, not keys and values", where=name, help="write key: value pairs",
                         code=_CODES.get(what, ""))  # fmt: skip
    return {str(key): entry for key, entry in value.items()}
