"""Live bytes of what ops make."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Live bytes of what ops make, with the peak since the last mark. block: what a storage's bytes are rounded up to."""

    block = 1

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in given | self.known and storage.nbytes():
                nbytes = -(-storage.nbytes() // self.block) * self.block
                self.known.add(storage._cdata)
                self.live += nbytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, nbytes)
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes
