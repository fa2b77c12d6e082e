"""The real module, run once under fake tensors with CUDA's choices imposed: the only room that imports torch, and only in a worker."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from typing import Any

from launchguard.errors import InputError, Unpredictable
from launchguard.events import StepTrace
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.trace import cache
from launchguard.trace.request import TraceRequest, request_of, requests_of

__all__ = ["TraceRequest", "joined", "request_of", "requests_of", "trace_job", "trace_requests"]


def trace_job(
    job: JobSpec, device: DeviceProfile, progress: Callable[[str], None] = lambda text: None, use_cache: bool = True
) -> StepTrace:
    """The job's micro-batch (with its evaluation batch, if it evaluates), from the cache or from a worker process.
    Raises InputError for a model that cannot be built, Unpredictable for one that cannot be traced."""
    return joined(trace_requests(requests_of(job, device), progress, use_cache))


def trace_requests(
    requests: Sequence[TraceRequest], progress: Callable[[str], None] = lambda text: None, use_cache: bool = True
) -> list[StepTrace]:
    """The traces of several requests, in their order. One worker process makes those that are not in the cache."""
    keys = [request.key() for request in requests]
    found = [cache.load(key) if use_cache else None for key in keys]
    missing = [i for i, trace in enumerate(found) if trace is None]
    for i, data in zip(missing, _in_worker([requests[i] for i in missing], progress) if missing else []):
        if use_cache:
            cache.store(keys[i], data)
        found[i] = cache.decode(data)
    return [trace for trace in found if trace is not None]


def joined(traces: Sequence[StepTrace]) -> StepTrace:
    """The traces of requests_of as one: the training step, which holds its evaluation and its first micro-batch."""
    step, *others = traces
    evaluation = next((t for t in others if t.facts.get("kind") == "evaluation"), None)
    first = next((t for t in others if t.facts.get("kind") == "first"), None)
    return dataclasses.replace(step, evaluation=evaluation, first=first) if others else step


def _in_worker(requests: list[TraceRequest], progress: Callable[[str], None]) -> list[bytes]:
    from launchguard.trace.worker import main

    # forked, the worker inherits the torch that a launcher's parser has already imported (2 s); elsewhere fork is not safe
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=main, args=(requests, sender), daemon=True)
    process.start()
    sender.close()
    traces: list[bytes] = []
    try:
        while len(traces) < len(requests):
            kind, value = receiver.recv()
            if kind == "progress":
                progress(value)
            elif kind == "trace":
                traces.append(value)
            else:
                what, message, where, help_ = value
                raise (InputError if what == "input" else Unpredictable)(message, where=where, help=help_)
        return traces
    except EOFError:
        process.join()
        raise Unpredictable(f"the trace worker died (exit code {process.exitcode})",
                            help="set LAUNCHGUARD_DEBUG=1 to see its output") from None  # fmt: skip
    finally:
        process.kill()
        process.join()
        receiver.close()
