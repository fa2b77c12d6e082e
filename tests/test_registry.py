from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator

import pytest

from launchguard import registry
from launchguard.errors import InputError


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    caches = (registry.names, registry.load, registry._modules, registry._entry_points)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_names_are_files_without_helpers() -> None:
    assert "torchrun" in registry.names("launch")
    assert not any(name.startswith("_") for name in registry.names("launch"))


def test_listing_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "launchguard.launch.python", raising=False)
    registry.names("launch")
    assert "launchguard.launch.python" not in sys.modules


def test_load_checks_the_contract() -> None:
    assert callable(registry.load("launch", "torchrun").parse)


def test_unknown_name_and_room() -> None:
    with pytest.raises(InputError, match="unknown name 'mpirun' in launch") as error:
        registry.load("launch", "mpirun")
    assert "torchrun" in error.value.help
    with pytest.raises(ValueError, match="no room 'garage'"):
        registry.names("garage")


def test_broken_module_is_named_with_what_it_lacks() -> None:
    module = types.ModuleType("mine")
    module.__file__ = "launch/mine.py"
    module.parse = lambda argv: None  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"launch/mine.py lacks matches\(\), which every module of launch/ has"):
        registry.verify("launch", module)


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("third_party_launcher")
    module.matches = module.parse = lambda *args: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "third_party_launcher", module)
    point = importlib.metadata.EntryPoint("mpirun", "third_party_launcher", "launchguard.launch")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "launchguard.launch" else [])
    assert "mpirun" in registry.names("launch")
    assert registry.load("launch", "mpirun") is module
