"""Liger's own Python under the trace: what its layers keep, and the logits that are never whole."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from launchguard.events import StepTrace, TraceOp
from launchguard.job import JobSpec, LoraSpec, Precision
from launchguard.profiles import device
from launchguard.trace import trace_job

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel (pip install --no-deps)")
CARD = device("a100-80-sxm")
BF16 = Precision("bfloat16", "bfloat16", "bfloat16")


def traced(job: JobSpec, **liger: bool) -> StepTrace:
    return trace_job(dataclasses.replace(job, model=dataclasses.replace(job.model, use_liger_kernel=True, liger_kernel_config=liger)), CARD)


def peak(trace: StepTrace) -> int:
    live, now, most = {}, 0, 0
    for event in trace.events:
        if event.op == TraceOp.ALLOC:
            live[event.a] = event.b
            now += event.b
        elif event.op == TraceOp.FREE:
            now -= live.pop(event.a)
        most = max(most, now)
    return most


def sizes(trace: StepTrace) -> set[int]:
    return {e.b for e in trace.events if e.op == TraceOp.ALLOC}


def test_no_logits_of_the_whole_batch(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(config={"vocab_size": 4096}, seq_len=256, precision=BF16)
    whole = {2 * 256 * 4096 * width for width in (2, 4)}
    assert whole & sizes(trace_job(job, CARD))
    trace = traced(job)
    assert not whole & sizes(trace)
    assert peak(trace) < 0.6 * peak(trace_job(job, CARD))
    assert not trace.facts["value_reads"]
    assert sum(e.op == TraceOp.GRAD for e in trace.events) == len(trace.params)


def test_layers_alone(make_job: Callable[..., JobSpec]) -> None:
    """With the model's own loss the layers still keep less: SwiGLU's product and RMSNorm's float32 copy are made again."""
    job = make_job(seq_len=256, precision=BF16)
    off = traced(job, rope=False, swiglu=False, rms_norm=False, fused_linear_cross_entropy=False)
    assert peak(off) == peak(trace_job(job, CARD))
    assert peak(traced(job, fused_linear_cross_entropy=False)) < peak(off)


def test_the_norms_gradient_has_a_row_for_each_sm(make_job: Callable[..., JobSpec]) -> None:
    assert CARD.sms * 64 * 4 in sizes(traced(make_job(precision=BF16)))


def test_adapters(make_job: Callable[..., JobSpec]) -> None:
    job = make_job(seq_len=256, precision=BF16, lora=LoraSpec(r=4, target_modules=("q_proj", "up_proj")))
    trace = traced(job)
    assert peak(trace) < peak(trace_job(job, CARD))
    assert {e.a for e in trace.events if e.op == TraceOp.GRAD} == {i for i, p in enumerate(trace.params) if p.requires_grad}


@pytest.mark.parametrize("changes", [{"autocast": "bfloat16"}, {"autocast": "bfloat16", "float32_outputs": True}])
def test_autocast(make_job: Callable[..., JobSpec], changes: dict[str, Any]) -> None:
    job = make_job(seq_len=256, precision=Precision(**changes))
    assert peak(traced(job)) < peak(trace_job(job, CARD))
