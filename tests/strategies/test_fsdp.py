"""FSDP's rules that the real code cannot show on fake tensors (tests/conformance says why), on hand-made traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launchguard.events import Category, MemoryEvent, ModuleInfo, Op, ParamInfo, StepTrace, TraceEvent, TraceOp
from launchguard.fsdp_units import peft_policy, units_of
from launchguard.job import FsdpSpec, GenerationSpec, JobSpec, LaunchSpec, LoraSpec, ModelSpec, OptimizerSpec, QuantizationSpec, SavingSpec
from launchguard.profiles import device
from launchguard.strategies import fsdp1, fsdp2
from launchguard.units import dtype_bytes

WIDTH = 4096


def trace_of(params: list[ParamInfo]) -> StepTrace:
    """Two layers, one parameter each, both with gradients of their own size if trained."""
    modules = (ModuleInfo("", "Model", -1), ModuleInfo("a", "Layer", 0), ModuleInfo("b", "Layer", 0))
    events = [TraceEvent(TraceOp.FORWARD), TraceEvent(TraceOp.ENTER, 0)]
    for m in (1, 2):
        events += [TraceEvent(TraceOp.ENTER, m), TraceEvent(TraceOp.ALLOC, m, 100), TraceEvent(TraceOp.EXIT, m)]
    events += [TraceEvent(TraceOp.EXIT, 0), TraceEvent(TraceOp.BACKWARD), TraceEvent(TraceOp.BACKWARD_ENTER, 0)]
    for m in (2, 1):
        events.append(TraceEvent(TraceOp.BACKWARD_ENTER, m))
        if params[m - 1].requires_grad:
            events += [
                TraceEvent(TraceOp.ALLOC, m + 10, 4 * WIDTH),
                TraceEvent(TraceOp.GRAD, m - 1, m + 10),
                TraceEvent(TraceOp.FREE, m + 10),
            ]
        events += [TraceEvent(TraceOp.BACKWARD_EXIT, m), TraceEvent(TraceOp.FREE, m)]
    return StepTrace(tuple(params), modules, (), (*events, TraceEvent(TraceOp.END)), {})


def job_of(version: int, **fields: object) -> JobSpec:
    spec = FsdpSpec(version=version, wrap_policy="TRANSFORMER_BASED_WRAP", wrap_classes=("Layer",), accelerate_grouping=False)
    launch = LaunchSpec("torchrun", (), ".", "train.py", nproc_per_node=4)
    return JobSpec(launch, ModelSpec("tiny"), strategy=f"fsdp{version}", optimizer=OptimizerSpec("adamw", "fused"),
                   fsdp=replace(spec, **fields))  # fmt: skip


def peak(events: tuple[MemoryEvent, ...], phase: str, category: Category) -> int:
    live: dict[int, int] = {}
    now, found = "", 0
    for e in events:
        if e.op is Op.PHASE:
            now = e.label
        elif e.op is Op.ALLOC and e.category is category:
            live[e.handle] = e.nbytes
        elif e.op is Op.FREE:
            live.pop(e.handle, None)
        if now == phase:
            found = max(found, sum(live.values()))
    return found


def params(dtype: str = "float32", trained: bool = True) -> list[ParamInfo]:
    return [ParamInfo(f"{name}.weight", (WIDTH,), dtype, trained, m, (m,)) for m, name in ((1, "a"), (2, "b"))]


def test_offloaded_gradient_shards_stay_to_the_end_of_backward() -> None:
    """Both units' shards at once, beside one flat gradient; none in the step (_finalize_params: prepare_gradient_for_optim)."""
    events = fsdp1.schedule(job_of(1, offload_params=True), trace_of(params()), (0,), device("a100-80-sxm")).events
    shard, whole = WIDTH, 4 * WIDTH
    assert peak(events, "backward_2", Category.GRADIENTS) == 2 * whole + shard  # the gradient and its flat copy, the other unit's shard
    assert peak(events, "step_2", Category.GRADIENTS) == 0


@pytest.mark.parametrize(("storage", "whole"), [("uint8", True), ("bfloat16", False)])
def test_integer_four_bit_weights_are_not_sharded(storage: str, whole: bool) -> None:
    """accelerate 1.15 fsdp_utils.py:fsdp2_prepare_model keeps them out of fully_shard; the model is on the device from the start."""
    job = replace(job_of(2), quantization=QuantizationSpec("nf4", quant_storage=storage))
    trace = trace_of([*params(storage, trained=False)[:1], *params("float32")[1:]])
    events = fsdp2.schedule(job, trace, (0,), device("a100-80-sxm")).events
    assert peak(events, "load", Category.PARAMETERS) == sum(p.numel * dtype_bytes(p.dtype) for p in trace.params)
    kept = [e.nbytes for e in events if e.op is Op.ALLOC and e.label == "parameters (not sharded)"]
    assert kept == ([WIDTH] if whole else [])


def test_the_trainer_wraps_adapters_on_their_own_under_fsdp1() -> None:
    """FSDP2 keeps the user's policy: its optimizer is made first (transformers 5.24 trainer.py:_prepare_for_training)."""
    modules = (ModuleInfo("", "Model", -1), ModuleInfo("l", "Layer", 0), ModuleInfo("l.base", "Linear", 1), ModuleInfo("l.A", "Linear", 1))
    table = (ParamInfo("l.base.weight", (8, 8), "float32", False, 2, (2,)), ParamInfo("l.A.weight", (2, 8), "float32", True, 3, (3,)))
    trace = StepTrace(table, modules, (), (), {})
    job = replace(job_of(1), lora=LoraSpec(), loop="trainer")
    assert job.fsdp is not None
    assert peft_policy(job) and not peft_policy(replace(job, loop="torch"))
    assert not peft_policy(replace(job, fsdp=replace(job.fsdp, version=2)))
    assert [u.name for u in units_of(trace, job.fsdp, peft=True)] == ["l.A", "l"]
    assert [u.name for u in units_of(trace, job.fsdp)] == ["l"]


@pytest.mark.parametrize(
    ("version", "where", "whole"), [(1, "device", 3), (1, "rank 0", 1), (1, "sharded", 0), (2, "device", 2), (2, "rank 0", 1)]
)
def test_what_a_script_gathers_by_itself(version: int, where: str, whole: int) -> None:
    """Tensors of one layer's size at the peak: on the device the clones of both layers stay (FSDP1 beside the unit that is whole)."""
    job = replace(job_of(version), saving=SavingSpec(library=False, script=where))
    strategy = fsdp1 if version == 1 else fsdp2
    events = strategy.schedule(job, trace_of(params()), (0,), device("a100-80-sxm")).events
    extra = peak(events, "save", Category.COMMUNICATION) - peak(events, "idle", Category.COMMUNICATION)
    assert extra == whole * 4 * WIDTH


def test_generation_with_every_unit_whole_and_its_cache() -> None:
    spec = GenerationSpec("evaluation", sequences=2, cache_bytes=5000, layer_bytes=500, vocabulary=10, whole=True)
    events = fsdp1.schedule(replace(job_of(1), generation=spec), trace_of(params()), (0,), device("a100-80-sxm")).events
    extra = peak(events, "generation", Category.COMMUNICATION) - peak(events, "idle", Category.COMMUNICATION)
    assert extra == 2 * 4 * WIDTH and peak(events, "generation", Category.ACTIVATIONS) == 5000
    synced = fsdp2.schedule(replace(job_of(2), generation=replace(spec, sync=True)), trace_of(params()), (0,), device("a100-80-sxm")).events
    assert peak(synced, "generation", Category.COMMUNICATION) - peak(synced, "idle", Category.COMMUNICATION) == 4 * WIDTH


def test_the_reference_model_is_sharded_too() -> None:
    for version, strategy in ((1, fsdp1), (2, fsdp2)):
        plain, held = (
            peak(strategy.schedule(job, trace_of(params()), (0,), device("a100-80-sxm")).events, "idle", Category.PARAMETERS)
            for job in (job_of(version), replace(job_of(version), reference=True))
        )
        assert held - plain == 2 * 4 * WIDTH // 4  # two layers in float32 over four ranks
