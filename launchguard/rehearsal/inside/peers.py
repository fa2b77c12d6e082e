"""The other ranks: torch's `fake` process group, collectives that return at once, and the device bytes of a communicator."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "reduce",
               "reduce_scatter", "reduce_scatter_tensor", "barrier", "send", "recv")  # fmt: skip


class Peers:
    """communicator_bytes: what one communicator takes outside torch's allocator, charged at the first collective of a group."""

    def __init__(self, cudart: ctypes.CDLL, device: int, communicator_bytes: int) -> None:
        self.cudart, self.device, self.communicator_bytes = cudart, device, communicator_bytes
        self.charged: set[Any] = set()
        self.in_hook = False
        self.awaited = 0  # objects that another rank would have sent
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

    def with_results(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A communication hook whose asynchronous collectives have results, which the fake group's have not."""

        @functools.wraps(hook)
        def called(state: Any, bucket: Any) -> Any:
            self.in_hook = True
            try:
                return hook(state, bucket)
            finally:
                self.in_hook = False

        return called

    def _charging(self, name: str) -> None:
        original = getattr(dist, name)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            self.communicates(kwargs.get("group"))
            if name == "barrier":
                return None
            work = original(*args, **kwargs)
            return _Work(work, args[0] if args else next(iter(kwargs.values()))) if self.in_hook and work is not None else work

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
            "gather_object": _gather_object, "scatter_object_list": self._scatter_object_list,
            "broadcast_object_list": self._broadcast_object_list, "monitored_barrier": _nothing,
        }  # fmt: skip
        for module in (dist, c10d):
            for name, function in replaced.items():
                setattr(module, name, function)

    def _broadcast_object_list(self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
                               group_src: int | None = None, **kwargs: Any) -> None:  # fmt: skip
        own = dist.get_rank() if group_src is None else dist.get_rank(group)
        self.awaited += own != (group_src if group_src is not None else src or 0)

    def _scatter_object_list(self, scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, *args: Any,
                             **kwargs: Any) -> None:  # fmt: skip
        self.awaited += not scatter_object_input_list
        scatter_object_output_list[0] = scatter_object_input_list[0] if scatter_object_input_list else None


class _Work:
    """The work of a fake collective; its future has what the collective writes to, a tensor or a list of them."""

    def __init__(self, work: Any, out: Any) -> None:
        self.work, self.out = work, out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def get_future(self) -> Any:
        results = self.out if isinstance(self.out, list) else [self.out]
        return with_result(results[0], results)


def with_result(tensor: torch.Tensor, result: Any) -> Any:
    """A finished future on the tensor's device."""
    future: Any = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else [])
    future.set_result(result)
    return future


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)
