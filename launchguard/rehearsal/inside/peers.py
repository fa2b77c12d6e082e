"""The other ranks: torch's `fake` process group, collectives that return at once, and the device bytes of a communicator."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "reduce",
               "reduce_scatter", "reduce_scatter_tensor", "barrier", "send", "recv")  # fmt: skip


class Peers:
    """communicator_bytes: what one communicator takes outside torch's allocator, charged at the first collective of a group."""

    def __init__(self, cudart: ctypes.CDLL, device: int, communicator_bytes: int) -> None:
        self.cudart, self.device, self.communicator_bytes = cudart, device, communicator_bytes
        self.charged: set[Any] = set()
        cudart.vcard_take.argtypes = [ctypes.c_int, ctypes.c_uint64]

    def install(self) -> None:
        self._fake_groups()
        for name in COLLECTIVES:
            self._charging(name)
        import torch.distributed.utils as utils
        import torch.nn.parallel.distributed as ddp

        utils._verify_param_shape_across_processes = ddp._verify_param_shape_across_processes = _nothing

    def communicates(self, group: Any) -> None:
        """A group is about to communicate: its communicator is made now, unless it has one or stands alone."""
        if not dist.is_initialized():
            return
        key = "default" if group is None or group is dist.group.WORLD else group
        if key in self.charged or dist.get_world_size(group) < 2:
            return
        self.charged.add(key)
        if not self.cudart.vcard_take(self.device, self.communicator_bytes):
            raise dist.DistBackendError("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory' (the card is full)")

    def _charging(self, name: str) -> None:
        original = getattr(dist, name)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            self.communicates(kwargs.get("group"))
            return _nothing() if name == "barrier" else original(*args, **kwargs)

        for module in (dist, c10d):
            setattr(module, name, collective)

    def _fake_groups(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        init, new_group = dist.init_process_group, dist.new_group

        @functools.wraps(init)
        def init_process_group(backend: Any = None, *args: Any, world_size: int = -1, rank: int = -1, **kwargs: Any) -> Any:
            world = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
            return init("fake", rank=rank if rank >= 0 else int(os.environ.get("RANK", "0")), world_size=world, store=FakeStore())

        @functools.wraps(new_group)
        def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pg_options", None), kwargs.pop("device_id", None)
            return new_group(ranks, *args, **kwargs)

        replaced: dict[str, Callable[..., Any]] = {
            "init_process_group": init_process_group, "new_group": group, "all_gather_object": _all_gather_object,
            "gather_object": _gather_object, "scatter_object_list": _scatter_object_list, "broadcast_object_list": _nothing,
            "monitored_barrier": _nothing,
        }  # fmt: skip
        for module in (dist, c10d):
            for name, function in replaced.items():
                setattr(module, name, function)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _all_gather_object(objects: list[Any], item: Any, group: Any = None) -> None:
    objects[:] = [item] * len(objects)


def _gather_object(item: Any, objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if objects is not None:
        _all_gather_object(objects, item)


def _scatter_object_list(out: list[Any], objects: list[Any] | None, *args: Any, **kwargs: Any) -> None:
    out[0] = objects[0] if objects else None
