"""The script's own arguments, parsed as transformers.HfArgumentParser and trl.TrlParser would, without importing either.

Precedence inside the script (trl/scripts/utils.py:TrlParser.parse_args_and_config): flags, then the file behind --config, then values
written in the script's own code, then the defaults of the installed library's dataclasses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launchguard.configs._files import read_mapping
from launchguard.configs._installed import Field
from launchguard.errors import InputError
from launchguard.job import Origin, Setting

COMMAND_LINE = "command line"
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # transformers/hf_argparser.py:string_to_bool
_NUMBER = re.compile(r"^-\.?\d")
_SHORTEST_ABBREVIATION = 12
_HYDRA = re.compile(r"^\+{0,2}[A-Za-z_][\w.]*=")


@dataclass(frozen=True)
class ScriptArguments:
    """given: what the user stated; fields: the library's dataclass fields behind it, empty when the loop has none."""

    given: Mapping[str, Setting]
    fields: Mapping[str, Field] = field(default_factory=dict)

    def setting(self, *names: str) -> Setting | None:
        """The first of these names that the user stated; else the library's default of the first that it knows."""
        for name in names:
            if name in self.given:
                return self.given[name]
        for name in names:
            if name in self.fields:
                return Setting(self.fields[name].default, self.fields[name].origin)
        return None

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of `setting`; `default` when there is none or it is None."""
        setting = self.setting(*names)
        return default if setting is None or setting.value is None else setting.value

    def stated(self, *names: str) -> Setting | None:
        """The first of these names that the user stated."""
        return next((self.given[name] for name in names if name in self.given), None)


def parse(tokens: Sequence[str], fields: Mapping[str, Field], where: str = COMMAND_LINE) -> dict[str, Setting]:
    """Flags by name (dashes as underscores), typed by the dataclass field of that name, else by their looks.

    `--key value`, `--key=value`, `--flag`, `--flag False`, `--no_flag`, `--list a b c`, and `key=value` (Hydra, LLaMA-Factory).
    Raises InputError for a value that the field's type refuses.
    """
    given: dict[str, Setting] = {}
    for flag, values in _groups(tokens):
        name = flag.lstrip("-").replace("-", "_")
        name = _abbreviated(name, fields)
        known = fields.get(name)
        if known is None and not values and name.startswith("no_") and _is_bool(fields.get(name[3:])):
            given[name[3:]] = Setting(False, Origin(where, flag))  # HfArgumentParser's complement of a True default
            continue
        given[name] = Setting(_typed(known, values, flag, where), Origin(where, flag))
    return given


def _abbreviated(name: str, fields: Mapping[str, Field]) -> str:
    """argparse accepts a unique beginning of a flag; only long ones are taken, for the script's own flags are not known here."""
    if name in fields or len(name) < _SHORTEST_ABBREVIATION:
        return name
    longer = [field for field in fields if field.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def from_file(name: str, cwd: str) -> dict[str, Setting]:
    """Arguments from the script's config file (YAML or JSON), by name; none of an Accelerate config that stands behind the script."""
    content = read_mapping(name, cwd, "script's config file")
    if "distributed_type" in content or "compute_environment" in content:
        return {}
    return {key.replace("-", "_"): Setting(_loose(value) if isinstance(value, str) else value, Origin(name, key))
            for key, value in content.items()}  # fmt: skip


def config_file_of(tokens: Sequence[str]) -> str | None:
    """The script's config file: behind --config, or the only argument (HfArgumentParser.parse_json_file / parse_yaml_file idiom)."""
    for flag, values in _groups(tokens):
        if flag in ("--config", "--config_file", "--config-file") and values and _is_config(values[0]):
            return values[0]
    positional = [token for token in tokens[:2] if not token.startswith("-")]
    return positional[0] if tokens and positional and positional[0] == tokens[0] and _is_config(tokens[0]) else None


def _is_config(name: str) -> bool:
    return name.endswith((".yaml", ".yml", ".json"))


def _groups(tokens: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, its values); positional arguments are passed over."""
    flag: str | None = None
    values: list[str] = []
    for token in tokens:
        is_flag = token.startswith("-") and len(token) > 1 and not _NUMBER.match(token)
        if not is_flag and not (_HYDRA.match(token) and not values and flag is None):
            values.append(token)
            continue
        if flag is not None:
            yield flag, values
        flag, equals, value = token.partition("=")
        values = [value] if equals else []
        if equals:  # nothing more can belong to `--key=value`
            yield flag.lstrip("+") if not is_flag else flag, values
            flag, values = None, []
    if flag is not None:
        yield flag, values


def _is_bool(known: Field | None) -> bool:
    return known is not None and known.accepts("bool")


def _typed(known: Field | None, values: Sequence[str], flag: str, where: str) -> Any:
    """The value of a flag by its field's annotation, by its looks for a flag no dataclass knows."""
    if known is not None and known.accepts("list") and (len(values) > 1 or not known.accepts("str")):
        return list(values)
    if not values:
        if known is None or known.accepts("bool"):
            return True
        raise InputError(f"{flag} has no value", where=f"{where} {flag}", help=f"{flag} {known.annotation}", code="LG261")
    if known is None:
        return [_loose(value) for value in values] if len(values) > 1 else _loose(values[0])
    try:
        return _scalar(known, values[0])
    except ValueError:
        raise InputError(f"{flag} {values[0]}: not a value of type {known.annotation}", where=f"{where} {flag}",
                         help=f"give a {known.annotation}", code="LG261") from None  # fmt: skip


def _scalar(known: Field, text: str) -> Any:
    if known.accepts("bool") and not known.accepts("str"):
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError(text)
    if known.accepts("str") or known.accepts("dict"):
        return int(text) if known.accepts("int") and text.isdigit() else text
    if known.accepts("int"):
        return int(text)
    return float(text) if known.accepts("float") else text


def _loose(text: str) -> Any:
    """A value nobody declared: numbers and booleans by their looks, everything else is text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for number in (int, float):
        try:
            return number(text) if not text.lower().lstrip("+-").startswith(("inf", "nan")) else text
        except ValueError:
            continue
    return text
