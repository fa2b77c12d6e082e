"""The shape of the tree: rooms, imports, sizes, and that every figure names its source."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "launchguard"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
PROFILES = sorted((PACKAGE / "profiles").rglob("*.yaml"))

FUNCTION_P90, FUNCTION_MAX, MODULE_MAX = 35, 100, 700  # lines


def functions() -> Iterator[tuple[str, int, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(name, lines, definition) of every function of the package."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1, node


def test_integrations_are_a_link_that_resolves() -> None:
    link = PACKAGE / "integrations"
    assert link.is_symlink() and link.resolve() == ROOT / "integrations"
    assert importlib.util.find_spec("launchguard.integrations") is not None


def test_imports_go_down_only() -> None:
    """The contracts of import-linter in pyproject.toml."""
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or pytest.skip("import-linter is not installed")
    result = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_functions_are_short() -> None:
    lengths = {name: lines for name, lines, _ in functions()}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_MAX} == {}
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= FUNCTION_P90


def test_modules_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > MODULE_MAX} == {}


def test_everything_is_annotated() -> None:
    bare = []
    for name, _, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        unannotated = [argument.arg for argument in arguments if argument.annotation is None and argument.arg not in ("self", "cls")]
        if unannotated or node.returns is None:
            bare.append(name)
    assert bare == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_say_what_they_are(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not source.strip() or ast.get_docstring(ast.parse(source)), "a module opens with what it is for"


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_profiles_name_their_source(path: Path) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content["source"], str) and len(content["source"]) > 10


@pytest.mark.parametrize("module", ["launchguard.allocator", "launchguard.profiles", "launchguard.registry", "launchguard.report.text", "launchguard.report.json"])  # fmt: skip # noqa: E501
def test_no_framework_is_imported(module: str) -> None:
    """A prediction from a cached trace, and every report, starts without torch; profiles parse nothing before they are asked."""
    code = f"import sys, json, {module}; print(json.dumps([m for m in ('torch', 'transformers', 'deepspeed', 'yaml') if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
