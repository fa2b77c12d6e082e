"""The real module, run once under fake tensors with CUDA's choices imposed: the only room that imports torch, and only in a worker."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from launchguard.errors import InputError, Unpredictable
from launchguard.events import StepTrace
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.trace import cache
from launchguard.trace.request import TraceRequest, request_of

__all__ = ["TraceRequest", "request_of", "trace_job", "trace_request"]


def trace_job(
    job: JobSpec, device: DeviceProfile, progress: Callable[[str], None] = lambda text: None, use_cache: bool = True
) -> StepTrace:
    """The job's micro-batch, from the cache or from a worker process.
    Raises InputError for a model that cannot be built, Unpredictable for one that cannot be traced."""
    return trace_request(request_of(job, device), progress, use_cache)


def trace_request(request: TraceRequest, progress: Callable[[str], None] = lambda text: None, use_cache: bool = True) -> StepTrace:
    """As trace_job, for a request."""
    key = request.key()
    found = cache.load(key) if use_cache else None
    if found is not None:
        return found
    data = _in_worker(request, progress)
    if use_cache:
        cache.store(key, data)
    return cache.decode(data)


def _in_worker(request: TraceRequest, progress: Callable[[str], None]) -> bytes:
    from launchguard.trace.worker import main

    # forked, the worker inherits the torch that a launcher's parser has already imported (2 s); elsewhere fork is not safe
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=main, args=(request, sender), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            kind, value = receiver.recv()
            if kind == "progress":
                progress(value)
            elif kind == "trace":
                return value
            else:
                what, message, where, help_ = value
                raise (InputError if what == "input" else Unpredictable)(message, where=where, help=help_)
    except EOFError:
        process.join()
        raise Unpredictable(f"the trace worker died (exit code {process.exitcode})",
                            help="set LAUNCHGUARD_DEBUG=1 to see its output") from None  # fmt: skip
    finally:
        process.kill()
        process.join()
        receiver.close()
