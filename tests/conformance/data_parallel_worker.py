"""Runs torch's own nn.DataParallel on fake tensors and writes what each card held.

    python data_parallel_worker.py CASES.json OUT.pickle

DataParallel, replicate, parallel_apply, Broadcast, ReduceAddCoalesced, Gather and Scatter are the real ones. Autograd's engine knows one
device of a Python backend, so all cards are that device, and a storage belongs to the card of the op's first input, or to the one whose
thread runs. Written here, as torch 2.13 csrc/cuda/comm.cpp has them: broadcast_coalesced, scatter and gather; NCCL's reduce writes into
the tensor that it is given. Threads of parallel_apply run one after another.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import fsdp_worker
from worker_results import write_results

DEVICE = fsdp_worker.DEVICE
CASE: dict[str, Any] = dict(kind="dp", cards=2, gas=1, kept=False)


class Cards:
    """Live bytes of each card by phase."""

    current = 0

    def __init__(self, count: int) -> None:
        self.live, self.card = [0] * count, dict[int, int]()
        self.rows: list[dict[str, Any]] = []

    def mode(self) -> Any:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        cards = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
                place = cards.of(given[0]) if given else Cards.current
                out = func(*args, **(kwargs or {}))
                for t in tree_leaves(out):
                    if isinstance(t, torch.Tensor):
                        cards.see(t, place)
                return out

        return Mode()

    def of(self, t: Any) -> int:
        return self.card.get(t.untyped_storage()._cdata, Cards.current)

    def see(self, t: Any, place: int) -> None:
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.card or t.device.type != DEVICE:
            return
        self.card[key] = place
        weakref.finalize(storage, self._gone, key, nbytes)
        self.live[place] += nbytes
        if self.rows:
            row = self.rows[-1]
            row["peak"][place] = max(row["peak"][place], self.live[place])

    def move(self, t: Any, place: int) -> None:
        storage = t.untyped_storage()
        self.live[self.card[storage._cdata]] -= storage.nbytes()
        self.live[place] += storage.nbytes()
        self.card[storage._cdata] = place

    def _gone(self, key: int, nbytes: int) -> None:
        self.live[self.card.pop(key)] -= nbytes

    def mark(self, phase: str) -> None:
        if self.rows:
            self.rows[-1]["end"] = list(self.live)
        self.rows.append(dict(phase=phase, peak=list(self.live), end=[]))


@contextlib.contextmanager
def on_card(card: Any) -> Iterator[None]:
    before = Cards.current
    Cards.current = before if card is None else int(card)
    try:
        yield
    finally:
        Cards.current = before


class Now:
    """A thread that runs when it is started: dispatch modes do not reach other threads."""

    def __init__(self, target: Any, args: Any) -> None:
        self.start = functools.partial(target, *args)

    def join(self) -> None: ...


class CardStream(fsdp_worker.Stream):
    def __enter__(self) -> CardStream:
        return self

    def __exit__(self, *args: Any) -> None: ...


# ------------------------------------------------------------------------------------------------ csrc/cuda/comm.cpp
def broadcast_coalesced(tensors: Sequence[Any], devices: Sequence[int], buffer_size: int) -> list[list[Any]]:
    """utils/tensor_flatten.cpp:take_tensors closes a group when it has reached the size; flatten_dense_tensors of one tensor is a view."""
    import torch

    outputs: list[dict[int, Any]] = [dict(enumerate(tensors)), *({} for _ in devices[1:])]
    for group in _groups(tensors, buffer_size):
        members = [tensors[i] for i in group]
        flat = torch._utils._flatten_dense_tensors(members)  # of C++'s loop: gone when the next is made
        for k, device in enumerate(devices[1:], 1):
            with on_card(device):
                copy = torch.empty(flat.shape, dtype=flat.dtype, device=DEVICE)
            for i, t in zip(group, torch._utils._unflatten_dense_tensors(copy, members)):
                outputs[k][i] = t.detach()
        del flat, members
    return [[found[i] for i in range(len(tensors))] for found in outputs]


def _groups(tensors: Sequence[Any], limit: int) -> list[list[int]]:
    closed, filling = [], dict[Any, list[int]]()
    for i, t in enumerate(tensors):
        group = filling.setdefault(t.dtype, [])
        group.append(i)
        if sum(tensors[j].numel() * tensors[j].element_size() for j in group) >= limit:
            closed.append(filling.pop(t.dtype))
    return closed + list(filling.values())


def scatter(tensor: Any, devices: Sequence[int], chunk_sizes: Any, dim: int, streams: Any) -> tuple[Any, ...]:

    chunks = tensor.split(list(chunk_sizes), dim) if chunk_sizes is not None else tensor.chunk(len(devices), dim)
    return tuple(c if int(d) == BOOKS[-1].of(tensor) else _copy(c.shape, c, d) for c, d in zip(chunks, devices))


def gather(tensors: Sequence[Any], dim: int, destination: int) -> Any:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _copy(shape, tensors[0], destination)


def _copy(shape: Sequence[int], like: Any, card: int) -> Any:
    import torch

    with on_card(card):
        return torch.empty(shape, dtype=like.dtype, device=DEVICE)


BOOKS: list[Cards] = []


def place_zeros(backward: Any) -> Any:
    """Zeros for outputs without a gradient are made on the output's device (csrc/autograd/python_function.cpp, OutputInfo::zeros)."""

    def wrapped(ctx: Any, *grads: Any) -> Any:
        for k, grad in enumerate(grads):
            BOOKS[-1].move(grad, ctx.target_gpus[k // ctx.num_inputs])
        return backward(ctx, *grads)

    return staticmethod(wrapped)


def start() -> Any:
    import torch
    from torch.nn.parallel import _functions, comm, data_parallel, parallel_apply, replicate

    mode = fsdp_worker.start()
    index = lambda device, *args, **kwargs: device if isinstance(device, int) else (device.index or 0)  # noqa: E731
    for module in (comm, sys.modules[data_parallel.__module__], sys.modules[parallel_apply.__module__], _functions,
                   sys.modules[replicate.__module__]):  # fmt: skip
        module._get_device_index = index  # type: ignore[attr-defined]
    places = sys.modules["torch.nn.parallel.data_parallel"]
    places._get_available_device_type = lambda: DEVICE  # type: ignore[attr-defined]
    places._get_all_device_indices = lambda: list(range(len(BOOKS[-1].live)))  # type: ignore[attr-defined]
    sys.modules["torch.nn.parallel.parallel_apply"].threading = types.SimpleNamespace(  # type: ignore[attr-defined]
        Thread=lambda target, args: Now(target, args), Lock=contextlib.nullcontext
    )
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda *a, **k: torch.device(DEVICE)  # type: ignore[assignment]
    torch.accelerator.device_index = on_card  # type: ignore[assignment,misc]
    torch.accelerator.current_stream = lambda *a: CardStream()  # type: ignore[assignment,return-value]
    torch._C._broadcast_coalesced, torch._C._scatter, torch._C._gather = broadcast_coalesced, scatter, gather  # type: ignore[attr-defined]
    comm.nccl = types.SimpleNamespace(is_available=lambda inputs: True, reduce=lambda *a, **k: None)  # type: ignore[assignment]
    _functions.Broadcast.backward = place_zeros(_functions.Broadcast.backward)  # type: ignore[method-assign]
    torch.Tensor.get_device = lambda t: BOOKS[-1].of(t)  # type: ignore[method-assign,assignment]
    return mode


def batch_of(size: int) -> dict[str, Any]:
    import torch

    return {name: torch.ones(size, 5, device=DEVICE, dtype=torch.long) for name in ("input_ids", "labels")}


def step(model: Any, batch: dict[str, Any]) -> Any:
    outputs = model(**batch)
    return outputs["loss"], outputs


def run_framework(case: dict[str, Any], mode: Any) -> list[dict[str, Any]]:
    """Three optimizer steps as the Trainer makes them: loss in the model, outputs dropped before backward."""
    import torch

    books = Cards(case["cards"])
    BOOKS.append(books)
    with mode, books.mode():
        with torch.device(DEVICE):
            plain = fsdp_worker.build(case, case["storage"])
        books.mark("load")
        books.mark("prepare")
        model = torch.nn.DataParallel(plain)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        batches: list[Any] = []
        for n in ("1", "2", "2"):
            batches = [batch_of(2 * case["cards"]) for _ in range(case["gas"])]
            for batch in batches:
                books.mark(f"forward_{n}")
                outputs = model(**batch)
                loss = outputs["loss"].mean()
                del outputs
                books.mark(f"backward_{n}")
                loss.backward()
                del loss
            del batch
            books.mark(f"step_{n}")
            optimizer.step()
            books.mark("idle")
            optimizer.zero_grad()
        books.mark("end")
    return books.rows[:-1]


def main(cases_file: str, out_file: str) -> None:
    with open(cases_file) as f:
        cases = [{**fsdp_worker.CASE, **CASE, **c} for c in json.load(f)]
    mode = start()
    fsdp_worker.import_libraries()

    def fill(case: dict[str, Any], result: Any) -> None:
        result.trace = fsdp_worker.trace_of(case, mode, lambda: batch_of(2), step)
        result.phases = run_framework(case, mode)

    write_results(cases, fill, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a Python PrivateUse1 backend aborts at interpreter exit
