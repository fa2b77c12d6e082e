"""DeepSpeed ZeRO, stages 0 to 3 (rules read in deepspeed 0.19.8; each names file:function)."""

from __future__ import annotations

from launchguard.events import RankSchedule, StepTrace
from launchguard.job import JobSpec, ZeroSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import run_job
from launchguard.strategies._zero_base import ZeroEngine, parameter_groups
from launchguard.strategies._zero_flat import rank_groups
from launchguard.strategies._zero_stage0 import Bf16Engine, FusedHalfEngine, ReplicatedEngine, UnfusedHalfEngine
from launchguard.strategies._zero_stage3 import ShardedEngine
from launchguard.strategies._zero_stage12 import PartitionedEngine, flat_groups
from launchguard.units import dtype_name

READ_IN = {"deepspeed": "0.19.8"}


def representatives(job: JobSpec, trace: StepTrace) -> list[tuple[int, ...]]:
    """Stages 0 and 3 treat all ranks alike; stages 1 and 2 keep every parameter that touches a rank's partition whole."""
    zero = job.zero or ZeroSpec()
    if zero.stage not in (1, 2) or engine_class(job) is Bf16Engine:
        return [tuple(range(job.world_size))]
    numel = [p.numel for p in trace.params]
    return rank_groups(flat_groups(parameter_groups(job, trace), numel, job.world_size, zero.round_robin_gradients), job.world_size)


def engine_class(job: JobSpec) -> type[ZeroEngine]:
    """The wrapper that engine.py:_do_optimizer_sanity_check and _configure_optimizer choose."""
    zero = job.zero or ZeroSpec()
    dtype = dtype_name(zero.dtype)
    if zero.stage == 3:
        return ShardedEngine
    if zero.stage in (1, 2):
        fp32_accumulation = dtype_name(zero.grad_accum_dtype or zero.dtype) == "float32"
        plain = zero.stage == 1 and dtype == "bfloat16" and fp32_accumulation and zero.offload_optimizer == "none"
        return Bf16Engine if plain else PartitionedEngine
    if dtype == "float32":
        return ReplicatedEngine
    return FusedHalfEngine if job.optimizer.implementation == "deepspeed_fused" else UnfusedHalfEngine


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    """Everything the first of `ranks` allocates, on the device and (offloaded state) on the host."""
    engine = engine_class(job)(job, trace, ranks[0], device)
    events = run_job(engine).events
    return RankSchedule(ranks=ranks, events=tuple(events), host=tuple(engine.host_phases))
