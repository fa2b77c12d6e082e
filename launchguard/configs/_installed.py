"""Facts about installed libraries that cost no import: versions and the defaults of their dataclasses, read from their source."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from launchguard.installed import version_of
from launchguard.job import Origin
from launchguard.profiles.library_defaults import library_defaults


@dataclass(frozen=True)
class Field:
    """One dataclass field. annotation: as written; default: None also when it has none or cannot be told without running code."""

    name: str
    annotation: str
    default: Any
    origin: Origin

    def accepts(self, kind: str) -> bool:
        """True when `kind` is one of the alternatives of the annotation ("bool | None" accepts "bool")."""
        return any(part.strip() == kind or part.strip().startswith(f"{kind}[") for part in self.annotation.split("|"))


_SOURCES = {  # class -> (distribution, file in the package, its base among these)
    "TrainingArguments": ("transformers", "training_args.py", None),
    "Seq2SeqTrainingArguments": ("transformers", "training_args_seq2seq.py", "TrainingArguments"),
    "_BaseConfig": ("trl", os.path.join("trainer", "base_config.py"), "TrainingArguments"),
    "SFTConfig": ("trl", os.path.join("trainer", "sft_config.py"), "_BaseConfig"),
    "DPOConfig": ("trl", os.path.join("trainer", "dpo_config.py"), "_BaseConfig"),
    "ModelConfig": ("trl", os.path.join("trainer", "model_config.py"), None),
    "ScriptArguments": ("trl", os.path.join("scripts", "utils.py"), None),
}
_ENUMS = {"SchedulerType": "trainer_utils.py", "IntervalStrategy": "trainer_utils.py", "SaveStrategy": "trainer_utils.py",
          "HubStrategy": "trainer_utils.py", "OptimizerNames": "training_args.py"}  # fmt: skip
_TRAINERS = {"Trainer": ("transformers", "trainer.py"), "SFTTrainer": ("trl", os.path.join("trainer", "sft_trainer.py")),
             "DPOTrainer": ("trl", os.path.join("trainer", "dpo_trainer.py"))}  # fmt: skip


def default_of(distribution: str) -> str:
    """Origin source of a library's default: "default of transformers 5.24.0"."""
    return f"default of {distribution} {version_of(distribution) or '(not installed)'}"


@functools.cache
def dataclass_fields(name: str) -> Mapping[str, Field]:
    """Fields of a known configuration class of the installed library, bases included; a small table where it is not installed."""
    distribution, file, base = _SOURCES[name]
    fields = dict(dataclass_fields(base)) if base else {}
    tree = _parse(distribution, file)
    if tree is None:
        if name == "TrainingArguments":
            return _tabled()
        return fields
    for node in _classes(tree, name):
        fields.update(_fields_of(node, distribution))
    return fields


def _classes(tree: ast.Module | None, name: str) -> list[ast.ClassDef]:
    """The classes of this name in a module; none in one that could not be read."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name] if tree is not None else []


@functools.cache
def enum_values(name: str) -> tuple[str, ...]:
    """Values of an enumeration of the installed transformers; none where it is not installed or has moved."""
    tree = _parse("transformers", _ENUMS[name])
    members = (member for node in _classes(tree, name) for member in node.body)
    values = (_literal(member.value, {}) for member in members if isinstance(member, ast.Assign))
    return tuple(value for value in values if isinstance(value, str))


@functools.cache
def trainer_keywords(name: str) -> frozenset[str]:
    """Keywords that the installed Trainer, SFTTrainer or DPOTrainer takes; none where it takes any, or cannot be read."""
    tree = _parse(*_TRAINERS[name]) if name in _TRAINERS else None
    members = (member for node in _classes(tree, name) for member in node.body)
    for method in (member for member in members if isinstance(member, ast.FunctionDef) and member.name == "__init__"):
        taken = (*method.args.args, *method.args.kwonlyargs)
        return frozenset() if method.args.kwarg is not None else frozenset(argument.arg for argument in taken)
    return frozenset()


def _tabled() -> dict[str, Field]:
    """TrainingArguments from the defaults table, for a host without transformers; types by the look of the default."""
    table = library_defaults("transformers")
    return {name: Field(name, f"{type(value).__name__} | None" if value is not None else "bool | dict | str | None", value,
                        Origin(f"{table} (not installed here)", name)) for name, value in table.values.items()}  # fmt: skip


def _parse(distribution: str, file: str) -> ast.Module | None:
    """Syntax tree of a file of an installed package; the package is found, not imported."""
    spec = importlib.util.find_spec(distribution)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as source:
                return ast.parse(source.read())
    return None


def _fields_of(node: ast.ClassDef, distribution: str) -> Iterator[tuple[str, Field]]:
    constants: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            default = _default(statement.value, constants)
            yield name, Field(name, ast.unparse(statement.annotation), default, Origin(default_of(distribution), name))
        else:
            _collect(statement, constants)


def _collect(statement: ast.stmt, constants: dict[str, Any]) -> None:
    """Constants of a class body, with `if is_torch_greater_or_equal_than_2_8:` decided by the installed torch."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        constants[statement.targets[0].id] = _literal(statement.value, constants)
    elif isinstance(statement, ast.If):
        for inner in statement.body if _holds(ast.unparse(statement.test)) else statement.orelse:
            _collect(inner, constants)


def _holds(test: str) -> bool:
    """The two kinds of test in transformers/training_args.py: torch is there, torch is at least some version."""
    torch = version_of("torch")
    if torch is None:
        return False
    if test.startswith("is_torch_greater_or_equal_than_"):
        wanted = [int(part) for part in test.removeprefix("is_torch_greater_or_equal_than_").split("_") if part.isdigit()]
        return [int(part) for part in torch.split("+")[0].split(".")[: len(wanted)] if part.isdigit()] >= wanted
    return test == "is_torch_available()"


def _default(value: ast.expr | None, constants: Mapping[str, Any]) -> Any:
    """Default of `x: T = value`, through field(default=...) and field(default_factory=...)."""
    if isinstance(value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in keywords:
            return _literal(keywords["default"], constants)
        factory = keywords.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return _literal(factory.body, constants)
        return {"list": [], "dict": {}}.get(factory.id) if isinstance(factory, ast.Name) else None
    return _literal(value, constants)


def _literal(value: ast.expr | None, constants: Mapping[str, Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, ast.Name):
        return constants.get(value.id)
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


@contextmanager
def environ(**changes: str) -> Iterator[None]:
    """Within the block os.environ is a plain copy with changes: what a library writes into it is dropped."""
    own = os.environ
    os.environ = {**own, **changes}  # type: ignore[assignment]  # noqa: B003
    try:
        yield
    finally:
        os.environ = own  # noqa: B003
