"""Reads of values. Kernels do not run, so reads give zeros; the known questions that decide memory get the answer of a full batch, and
where the script's own code branches on a value is noted."""

from __future__ import annotations

import ctypes
import functools
import linecache
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

# `if loss.item() > 3`, `while not done:`, `x if t else y`; a read for printing or logging decides nothing
BRANCH = re.compile(r"\b(if|while|assert|elif)\b")
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _counted(get_value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """torch 2.14 optim/optimizer.py:_get_value: step counts on the card (loaded there) are at least 1, not a division by 1 - beta**0."""
    return lambda x: get_value(x) or 1.0 if isinstance(x, torch.Tensor) and x.is_cuda else get_value(x)


class Values:
    """answer(tensor, value): the next read of a scalar on the card gives `value`. reads: where the script branches on
    other scalars, and how often."""

    def __init__(self, cudart: ctypes.CDLL, padding: bool) -> None:
        self.cudart, self.padding = cudart, padding
        self.reads: dict[str, int] = {}
        cudart.vcard_answer.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def answer(self, tensor: Any, value: int) -> Any:
        if type(tensor) is torch.Tensor and tensor.is_cuda and tensor.numel() == 1:
            self.cudart.vcard_answer(tensor.data_ptr(), value)
        return tensor

    def nothing_is_padded(self, out: Any) -> Any:
        """The result of `.all()`: True (mask code takes its unpadded path) unless the batches are said to hold padding."""
        return out if self.padding else self.answer(out, 1)

    def install(self) -> None:
        tensor_all, torch_all = torch.Tensor.all, torch.all

        @functools.wraps(tensor_all)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.nothing_is_padded(tensor_all(tensor, *args, **kwargs))

        @functools.wraps(torch_all)
        def function(*args: Any, **kwargs: Any) -> Any:
            return self.nothing_is_padded(torch_all(*args, **kwargs))

        torch.Tensor.all, torch.all = method, function
        for name in ("item", "tolist", "__bool__"):
            self._watch(name)
        for module in [module for name, module in sys.modules.items() if name.startswith("torch.optim.") and hasattr(module, "_get_value")]:
            module._get_value = _counted(module._get_value)  # type: ignore[attr-defined]

    def _watch(self, name: str) -> None:
        """Note where code outside the installed libraries reads a value from the card in order to branch."""
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def watched(tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.is_cuda:
                frame = sys._getframe(1)
                file = frame.f_code.co_filename
                if (
                    "site-packages" not in file
                    and not file.startswith((OWN_FOLDER, "<"))
                    and (name == "__bool__" or BRANCH.search(linecache.getline(file, frame.f_lineno)))
                ):
                    where = f"{file}:{frame.f_lineno}"
                    self.reads[where] = self.reads.get(where, 0) + 1
            return original(tensor, *args)

        setattr(torch.Tensor, name, watched)
