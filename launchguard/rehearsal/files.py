"""What a rehearsed script does to files: where its writes go, what it would have deleted, and what got past that.

stubs/files.c holds the writes of every library that calls libc; a program that talks to the kernel by itself (a static binary) is not held,
so the working folder is looked at afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG

CACHES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
)
MAX_LOOKED_AT = 50_000  # entries of the working folder


def files_environment(work: Path, env: Mapping[str, str]) -> dict[str, str]:
    """What stubs/files.c reads. work: the rank's scratch folder. Caches stay where they are: a second run finds them."""
    home = env.get("HOME") or os.path.expanduser("~")
    folders = [str(work), f"{home}/.cache", f"{home}/.triton", *(env[name] for name in CACHES if env.get(name)), "/dev", "/proc", "/sys"]
    free = dict.fromkeys(path for folder in folders for path in (os.path.abspath(folder), os.path.realpath(folder)))
    (work / "files").mkdir()
    return {"LAUNCHGUARD_OVERLAY": str(work / "files"), "LAUNCHGUARD_FREE": ":".join(free), "LAUNCHGUARD_KEPT": str(work / "kept")}


def kept(work: Path) -> tuple[str, ...]:
    """What the script would have deleted or moved: the topmost paths, in the order in which it came to them."""
    listed = work / "kept"
    paths = list(dict.fromkeys(listed.read_text(errors="replace").splitlines())) if listed.is_file() else []
    every = set(paths)
    return tuple(path for path in paths if not any(str(parent) in every for parent in Path(path).parents))


def written(work: Path) -> frozenset[str]:
    """Files that the script wrote, by the paths that it knows."""
    root = str(work / "files")
    return frozenset(path.removeprefix(root) for path, stat in _entries(Path(root), work) if S_ISREG(stat.st_mode))


def changed_since(folder: Path, time_ns: int, ignored: Path) -> tuple[str, ...]:
    """Files and folders below `folder` that were made or changed since then: what nothing held back, or somebody else's work."""
    changed = (path for path, stat in _entries(folder, ignored) if stat.st_ctime_ns >= time_ns)
    return tuple(sorted(changed))


def _entries(folder: Path, ignored: Path) -> Iterator[tuple[str, os.stat_result]]:
    waiting, looked_at = [str(folder)], 0
    while waiting and looked_at < MAX_LOOKED_AT:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    looked_at += 1
                    if entry.path == str(ignored):
                        continue
                    yield entry.path, entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # it has gone, or is closed to us
            continue
