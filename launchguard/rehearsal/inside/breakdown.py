"""What was alive at the peak: the allocator's own history, with the blocks that hold parameters, gradients and optimizer states known."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from launchguard.rehearsal.inside.phases import Recorder, now_us

MAX_EVENTS = 4_000_000
DEEPSPEED_GRADIENTS = ("grad_partitions_flat_buffer", "averaged_gradients")  # runtime/zero/stage3.py, stage_1_and_2.py


class Breakdown:
    """Tags blocks by what they hold at every phase; explains the peak at the end."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.tags: list[tuple[int, dict[int, str]]] = []

    def install(self) -> None:
        torch.cuda._lazy_call(lambda: torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_EVENTS))
        self.recorder.on_phase.append(self.tag)

    def tag(self) -> None:
        """Which block holds what, now."""
        if not torch.cuda.is_initialized():
            return
        known: dict[int, str] = {}
        for category, tensor in self._tensors():
            address = _address(tensor)
            if address:
                known.setdefault(address, category)
        self.tags.append((now_us(), known))

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        root = self.recorder.root
        for parameter in root.parameters() if root is not None else ():
            yield "parameters", parameter
            yield "parameters", getattr(parameter, "ds_tensor", None)
            yield "gradients", parameter.grad
        for optimizer in self.recorder.optimizers.values():
            for name in DEEPSPEED_GRADIENTS:
                yield from (("gradients", tensor) for tensor in _flat(getattr(optimizer, name, None)))
            for state in list(getattr(optimizer, "state", {}).values()):
                yield from (("optimizer_states", tensor) for tensor in _flat(state))
            for group in getattr(optimizer, "param_groups", ()):
                yield from (("optimizer_states", tensor) for tensor in group["params"])  # masters, where they are not the model's own

    def at_peak(self) -> list[dict[str, Any]] | None:
        """[{category, label, bytes}] alive when most was allocated; None when the history is not complete."""
        if not torch.cuda.is_initialized():
            return []
        history = torch.cuda.memory._snapshot(self.recorder.device)["device_traces"][self.recorder.device]
        if len(history) >= MAX_EVENTS:
            return None
        totals: dict[tuple[str, str], int] = {}
        for category, label, nbytes in self._explained(history):
            totals[category, label] = totals.get((category, label), 0) + nbytes
        return [{"category": category, "label": label, "bytes": nbytes} for (category, label), nbytes in totals.items()]

    def _explained(self, history: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, int]]:
        times = [t for t, _ in self.recorder.marks]
        last_forward = max((i for i, (_, phase) in enumerate(self.recorder.marks) if phase.startswith("forward")), default=0)
        for block in _live_at_peak(history):
            made = self._mark_at(block["made"], times)
            tag = self._tag_of(block)
            yield tag or self._untagged(block, made, times, last_forward), f"made in {made}", block["bytes"]

    def _untagged(self, block: Mapping[str, Any], made: str, times: list[int], last_forward: int) -> str:
        """Made in forward and freed in a later phase (or still there at the end, in the step that failed): kept for backward."""
        if block["freed"] is None and bisect.bisect_right(times, block["made"]) < last_forward:
            return "overhead"  # a workspace that stays
        until = self._mark_at(block["freed"], times) if block["freed"] else "the end"
        return "activations" if made.startswith("forward") and until != made else "temporaries"

    def _mark_at(self, time: int, times: list[int]) -> str:
        return self.recorder.marks[max(bisect.bisect_right(times, time) - 1, 0)][1]

    def _tag_of(self, block: Mapping[str, Any]) -> str | None:
        for time, known in self.tags:
            if time >= block["made"] and (block["freed"] is None or time < block["freed"]) and block["address"] in known:
                return known[block["address"]]
        return None


def _live_at_peak(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Blocks alive at the largest total: address, bytes (rounded as the allocator counts them), made and freed in microseconds."""
    live: dict[int, dict[str, Any]] = {}
    every, total, largest, at = [], 0, 0, 0
    for i, event in enumerate(history):
        if event["action"] == "alloc":
            block = {
                "address": event["addr"],
                "bytes": -(-event["size"] // 512) * 512,
                "made": event["time_us"],
                "freed": None,
                "from": i,
                "to": None,
            }
            live[event["addr"]] = block
            every.append(block)
            total += block["bytes"]
            if total > largest:
                largest, at = total, i
        elif event["action"] == "free_completed" and event["addr"] in live:
            block = live.pop(event["addr"])
            block["freed"], block["to"] = event["time_us"], i
            total -= block["bytes"]
    return [block for block in every if block["from"] <= at and (block["to"] is None or block["to"] > at)]


def _flat(value: Any) -> Iterator[Any]:
    """Tensors in a nest of dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in list(value.values()):
            yield from _flat(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _flat(inner)


def _address(tensor: Any) -> int:
    """Address of the block on the card that holds a tensor (a DTensor's own shard); 0 where there is none."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # no storage: a fake or functional tensor
        return 0
