"""Side effects of a rehearsed script beyond those that stubs/files.c holds: no experiment tracker, nothing pushed to a hub, and the one
writer that renames without libc.

What is saved is zeros from the card, and files.c makes holes of zeros: a checkpoint of any size costs no disk, and can be loaded again.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

from launchguard.rehearsal.inside.libraries import after_import


def install() -> None:
    torch.serialization.set_crc32_options(False)  # sums over gigabytes of zeros tell nobody anything; torch.load does not look
    after_import({"transformers.training_args": _training_arguments, "safetensors.torch": _safetensors, "safetensors.numpy": _safetensors})


def _safetensors(module: Any) -> None:
    """safetensors 0.8 renames a temporary file by a system call of its own (Rust's rustix), past libc: it is given the scratch path."""
    original = module.serialize_file

    @functools.wraps(original)
    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensors, _place_of(filename), *args, **kwargs)

    module.serialize_file = serialize_file


def _place_of(path: Any) -> str:
    """Where stubs/files.c puts what is written to `path`. Raises OSError as the write would have."""
    place = ctypes.create_string_buffer(4096)  # PATH_MAX, linux/limits.h
    error = ctypes.CDLL(None).launchguard_written(os.fsencode(path), place)
    if error:
        raise OSError(error, os.strerror(error), os.fspath(path))
    return os.fsdecode(place.value)


def _training_arguments(module: Any) -> None:
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(arguments: Any) -> None:
        arguments.push_to_hub = False
        original(arguments)
        arguments.report_to = []

    module.TrainingArguments.__post_init__ = post_init
