"""Runs the unmodified DistributedDataParallel on real CPU tensors and writes what it held; the C++ reducer takes no fake tensors.

    python ddp_worker.py CASES.json OUT.pickle

One process is a world of one: every rank holds the same. The initial broadcast is left out: gloo's threads free its buffers where the
profiler does not look. Truth are the CPU allocator's own events (torch.profiler). The StepTrace of the plain module is taken as for FSDP
(fsdp_worker.py), with autograd's sums in place as real tensors get them: its ops allocate the same on both devices, but for scratch of
LayerNorm's CPU kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import types
from typing import Any

import fsdp_worker

CASE: dict[str, Any] = dict(kind="ddp", view=False, static=False, unused=False, hook=None, gas=1, width=200, vocabulary=1500)
MARK = "launchguard:"


def allocator_events(profile: Any) -> list[tuple[int, str, int, int]]:
    """(time, phase that begins or "", bytes, address) in order."""
    events = []
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        e = pending.pop()
        pending += e.children
        if e.tag.name == "Allocation":
            events.append((e.start_time_ns, "", e.extra_fields.alloc_size, e.extra_fields.ptr))
        elif e.name.startswith(MARK):
            events.append((e.start_time_ns, e.name.removeprefix(MARK), 0, 0))
    return sorted(events, key=lambda e: e[0])


def rows_of(events: list[tuple[int, str, int, int]]) -> list[dict[str, Any]]:
    live, known, rows = 0, {}, []
    for _, phase, nbytes, address in events:
        if phase:
            rows.append(dict(phase=phase, peak=live, end=live, streams=[]))
        elif nbytes > 0:
            known[address] = nbytes
            live += nbytes
        else:
            live -= known.pop(address, 0)
        if rows:
            rows[-1].update(end=live, peak=max(rows[-1]["peak"], live))
    return rows


IN_FLIGHT: list[Any] = []


class Reduced:
    """What all_reduce gives in a world of one, at once: gloo's threads would free tensors where the profiler does not look. It is held
    until the next collective, as ProcessGroupNCCL does (ProcessGroupNCCL.cpp: stashed_for_allocator_safety_, unstashed by workEnqueue),
    here to the end of backward at the latest."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        IN_FLIGHT[:] = [tensor]

    def get_future(self) -> Any:
        import torch

        future: Any = torch.futures.Future()
        future.set_result([self.tensor])
        return future


def register(model: Any, name: str) -> None:
    """The hook, as Accelerate registers it (utils/dataclasses.py:DistributedDataParallelKwargs.register_comm_hook)."""
    import torch.distributed as dist
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    dist.all_reduce = lambda tensor, *args, **kwargs: Reduced(tensor)
    model._check_comm_hook = lambda hook: None  # it asks for NCCL with bf16
    options = {"start_powerSGD_iter": 2} if name == "power_sgd" else {}
    DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(name), comm_state_option=options).register_comm_hook(model)


def run_framework(case: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    def mark(name: str) -> None:
        with record_function(MARK + name):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mark("load")
        plain = fsdp_worker.build(case, "float32")
        mark("prepare")
        model = torch.nn.parallel.DistributedDataParallel(
            plain, gradient_as_bucket_view=case["view"], static_graph=case["static"], find_unused_parameters=case["unused"], init_sync=False
        )
        if case["hook"]:
            register(model, case["hook"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for n in ("1", "2", "2", "2"):  # the last with what PowerSGD keeps from the one before
            for i in range(case["gas"]):
                with contextlib.nullcontext() if i == case["gas"] - 1 else model.no_sync():
                    mark(f"forward_{n}")
                    loss = fsdp_worker.run_model(case, model, "cpu")
                    mark(f"backward_{n}")
                    loss.backward()
                    del loss
                    IN_FLIGHT.clear()
            mark(f"step_{n}")
            optimizer.step()
            mark("idle")
            optimizer.zero_grad()
        mark("end")
    return [r for r in rows_of(allocator_events(recorded)) if r["phase"] != "end"]


def main(cases_file: str, out_file: str) -> None:
    import torch.distributed as dist

    with open(cases_file) as f:
        cases = [{**fsdp_worker.CASE, **CASE, **c} for c in json.load(f)]
    mode = fsdp_worker.start()  # first: autograd counts devices when it first runs
    fsdp_worker.import_libraries()
    traces = [fsdp_worker.trace_of(case, mode) for case in cases]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    run_framework(cases[0])  # what libraries allocate once
    results = [vars(types.SimpleNamespace(case=c, phases=run_framework(c), trace=t, error="")) for c, t in zip(cases, traces)]
    with open(out_file, "wb") as out:
        pickle.dump(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a Python PrivateUse1 backend aborts at interpreter exit
