"""Every refusal of the two rooms states a fact, a place and a remedy; read from the source, so that a new one cannot forget."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import launchguard

ROOT = Path(launchguard.__file__).parent
FILES = sorted(path for room in ("launch", "configs") for path in (ROOT / room).glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_input_errors_are_complete(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError":
            assert {"where", "help"} <= {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_heavy_is_imported_at_module_level(path: Path) -> None:
    heavy = {"torch", "transformers", "deepspeed", "accelerate", "peft", "trl", "huggingface_hub", "pynvml"}
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not heavy & {name.split(".")[0] for name in names}
        assert not any(
            name.startswith("launchguard.") and name.split(".")[1] in {"launch", "configs"} - {path.parent.name} for name in names
        )
