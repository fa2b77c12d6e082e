"""Side effects of a rehearsed script: what it writes goes to a scratch folder, what it would delete stays, saves cost no disk.

Paths below the scratch folder, the system's temporary folder and the caches are left alone. Elsewhere a write goes to the same path below
`overlay`, and a later look finds it there. This holds for Python's own file functions, torch.save and safetensors; files that native code
writes by itself are not seen.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launchguard.rehearsal.inside.libraries import after_import

COPIED_BYTES = 64 << 20  # an existing file that is opened for appending is copied up to this size
CACHES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
)


class Containment:
    def __init__(self, work: Path) -> None:
        self.overlay = work / "files"
        cache = [os.environ[name] for name in CACHES if os.environ.get(name)]
        folders = (str(work), tempfile.gettempdir(), str(Path.home() / ".cache"), str(Path.home() / ".triton"), *cache)
        self.free = [str(Path(folder).resolve()) + os.sep for folder in folders]
        self.free += ["/dev/", "/proc/", "/sys/"]
        self.kept: list[str] = []  # what the script would have deleted or moved
        self.written: list[str] = []
        self._real = {name: getattr(os, name) for name in ("stat", "lstat", "mkdir", "listdir", "scandir", "remove", "rmdir", "access")}
        self._open = builtins.open

    # -------------------------------------------------------- paths
    def covers(self, path: Any) -> bool:
        """Is this a path that the script must not change?"""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a file descriptor
        return not (os.path.abspath(os.fsdecode(path)) + os.sep).startswith(tuple(self.free))

    def in_overlay(self, path: Any) -> str:
        return str(self.overlay) + os.path.abspath(os.fsdecode(path))

    def found(self, path: Any) -> Any:
        """The overlay's path where the script has written it, else the path."""
        if self.covers(path):
            shadow = self.in_overlay(path)
            try:
                self._real["stat"](shadow)
                return shadow
            except OSError:
                pass
        return path

    def for_writing(self, path: Any) -> Any:
        if not self.covers(path):
            return path
        parent = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        self._real["stat"](self.found(parent))  # FileNotFoundError, as it would have been
        shadow = self.in_overlay(path)
        os.makedirs(self.in_overlay(parent), exist_ok=True)
        self.written.append(os.fsdecode(path))
        return shadow

    # -------------------------------------------------------- patches
    def install(self) -> None:
        builtins.open = io.open = self.open
        os.mkdir = self.mkdir
        for name in ("stat", "lstat", "listdir", "scandir", "access"):
            setattr(os, name, self._looking(self._real[name]))
        os.remove = os.unlink = self._deleting(self._real["remove"])
        os.rmdir = self._deleting(self._real["rmdir"])
        os.rename = os.replace = self._moving(os.replace)
        setattr(shutil, "rmtree", self._deleting(shutil.rmtree))  # noqa: B010
        torch.save = self.save
        after_import({"safetensors.torch": self.safetensors, "transformers.training_args": self.training_arguments})

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not any(letter in mode for letter in "wax+"):
            return self._open(self.found(file), mode, *args, **kwargs)
        shadow = self.for_writing(file)
        kept = shadow is not file and "w" not in mode  # appended to or changed in place: it starts as the user's own
        if kept and not os.path.exists(shadow) and os.path.exists(file) and os.path.getsize(file) <= COPIED_BYTES:
            shutil.copyfile(file, shadow)
        return self._open(shadow, mode, *args, **kwargs)

    def mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        if not self.covers(path) or kwargs.get("dir_fd") is not None:
            return self._real["mkdir"](path, *args, **kwargs)
        if os.path.exists(path):
            raise FileExistsError(17, "File exists", os.fsdecode(path))
        shadow = self.in_overlay(path)
        self._real["stat"](self.found(os.path.dirname(os.path.abspath(os.fsdecode(path)))))
        os.makedirs(os.path.dirname(shadow), exist_ok=True)
        return self._real["mkdir"](shadow, *args, **kwargs)

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            return original(path if kwargs.get("dir_fd") is not None else self.found(path), *args, **kwargs)

        return look

    def _deleting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def delete(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.covers(path) or kwargs.get("dir_fd") is not None:
                return original(path, *args, **kwargs)
            there = self.found(path)
            if there is not path:
                return original(there, *args, **kwargs)
            self._real["lstat"](path)  # FileNotFoundError, as it would have been
            self.kept.append(os.fsdecode(path))

        return delete

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            there = self.found(source)
            if there is source and self.covers(source):
                self.kept.append(os.fsdecode(source))
                return None
            return original(there, self.for_writing(target), *args, **kwargs)

        return move

    # -------------------------------------------------------- saves
    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """torch.save: everything is pickled, every storage comes to the host in turn, as in torch; the bytes of storages are dropped."""

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                if isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
                    value = value._untyped_storage if isinstance(value, torch.storage.TypedStorage) else value
                    if value.device.type != "meta":
                        value.cpu()
                    return ("storage", value.nbytes())
                return None

        if isinstance(f, (str, os.PathLike)):
            with self.open(f, "wb") as file:
                Pickler(file, protocol=2).dump(obj)
        else:
            Pickler(f, protocol=2).dump(obj)

    def safetensors(self, module: Any) -> None:
        original = module.save_file

        @functools.wraps(original)
        def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
            for tensor in tensors.values():
                if tensor.device.type != "meta":
                    tensor.detach().cpu()
            with self.open(filename, "wb") as file:
                file.write(b"\2\0\0\0\0\0\0\0{}")  # a valid file without tensors

        opened = module.safe_open
        module.save_file = save_file
        module.safe_open = lambda filename, *args, **kwargs: opened(self.found(filename), *args, **kwargs)

    def training_arguments(self, module: Any) -> None:
        """No experiment tracker, nothing pushed."""
        original = module.TrainingArguments.__post_init__

        @functools.wraps(original)
        def post_init(arguments: Any) -> None:
            arguments.push_to_hub = False
            original(arguments)
            arguments.report_to = []

        module.TrainingArguments.__post_init__ = post_init
