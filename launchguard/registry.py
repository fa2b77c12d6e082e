"""Rooms whose files are their contents: strategies, launchers, config formats, pieces of advice.

The file name is the key and a set of function names is the contract. Listing imports nothing; loading imports the one file asked for and
checks it at once, so that a contributor hears which function is missing in which file. Third parties add a module to a room by an entry
point in the group `launchguard.<room>`; the package's own file wins over an entry point of the same name.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType

from launchguard.errors import InputError

# Functions that every module of a room has. A module whose name begins with an underscore is the room's own business, not a member.
CONTRACTS: dict[str, tuple[str, ...]] = {
    "launch": ("matches", "parse"),
    "strategies": ("representatives", "schedule"),
    "advice": ("applies", "apply"),
}


@cache
def names(room: str) -> tuple[str, ...]:
    """Keys of a room, sorted: its modules and the entry points of `launchguard.<room>`. Nothing is imported."""
    return tuple(sorted({*_modules(room), *_entry_points(room)}))


@cache
def load(room: str, name: str) -> ModuleType:
    """The module `name` of a room, imported now and checked against the room's contract.

    InputError for a name that is not there, TypeError (naming file and function) for a module that breaks the contract.
    """
    if name in _modules(room):
        module = importlib.import_module(f"launchguard.{room}.{name}")
    elif name in _entry_points(room):
        module = _entry_points(room)[name].load()
    else:
        raise InputError(f"unknown name {name!r} in {room}", help=f"known: {', '.join(names(room)) or 'none'}")
    verify(room, module)
    return module


def load_all(room: str) -> dict[str, ModuleType]:
    """Every module of a room by key: for rooms that ask each member in turn (advice, launchers)."""
    return {name: load(room, name) for name in names(room)}


def verify(room: str, module: ModuleType) -> None:
    """Raise TypeError unless the module has every function of the room's contract."""
    missing = [function for function in CONTRACTS.get(room, ()) if not callable(getattr(module, function, None))]
    if missing:
        where = getattr(module, "__file__", None) or module.__name__
        raise TypeError(f"{where} lacks {', '.join(f'{function}()' for function in missing)}, which every module of {room}/ has")


@cache
def _modules(room: str) -> frozenset[str]:
    spec = find_spec(f"launchguard.{room}")
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"launchguard has no room {room!r}")
    found = (module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return frozenset(name for name in found if not name.startswith("_"))


@cache
def _entry_points(room: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"launchguard.{room}")}
