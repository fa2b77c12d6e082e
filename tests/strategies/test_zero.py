"""ZeRO's layout rules on hand-made traces; tests/conformance/test_deepspeed.py compares with the engine itself."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from launchguard.errors import InputError
from launchguard.events import Category, MemoryEvent, ModuleInfo, Op, ParamInfo, StepTrace, TraceEvent, TraceOp
from launchguard.job import JobSpec, LaunchSpec, ModelSpec, OptimizerSpec, Precision, ZeroSpec
from launchguard.profiles import device
from launchguard.strategies import zero
from launchguard.strategies._zero3_coordinator import Coordinator, Flight
from launchguard.strategies._zero_flat import FlatGroup, rank_groups, round_robin

ACTIVATION = 1000


def stack(widths: list[int], recompute: bool = False, frozen: frozenset[int] = frozenset()) -> StepTrace:
    """A chain of linear layers without bias; one saved activation per layer, or none and a recomputed forward in backward."""
    modules = [ModuleInfo("", "Sequential", -1), *(ModuleInfo(f"layer{i}", "Linear", 0) for i in range(len(widths)))]
    params = [ParamInfo(f"layer{i}.weight", (w,), "bfloat16", i not in frozen, i + 1, (i + 1,)) for i, w in enumerate(widths)]
    events = [TraceEvent(TraceOp.FORWARD), TraceEvent(TraceOp.ENTER, 0)]
    for i in range(len(widths)):
        events += [TraceEvent(TraceOp.ENTER, i + 1), TraceEvent(TraceOp.ALLOC, i + 1, ACTIVATION), TraceEvent(TraceOp.EXIT, i + 1)]
    events += [TraceEvent(TraceOp.EXIT, 0), TraceEvent(TraceOp.BACKWARD), TraceEvent(TraceOp.BACKWARD_ENTER, 0)]
    for i in reversed(range(len(widths))):
        grad = len(widths) + i + 1
        if recompute:
            events += [TraceEvent(TraceOp.ENTER, i + 1), TraceEvent(TraceOp.EXIT, i + 1)]
        events += [TraceEvent(TraceOp.BACKWARD_ENTER, i + 1)]
        if i not in frozen:
            events += [TraceEvent(TraceOp.ALLOC, grad, widths[i] * 2), TraceEvent(TraceOp.GRAD, i, grad), TraceEvent(TraceOp.FREE, grad)]
        events += [TraceEvent(TraceOp.FREE, i + 1), TraceEvent(TraceOp.BACKWARD_EXIT, i + 1)]
    return StepTrace(tuple(params), tuple(modules), (), (*events, TraceEvent(TraceOp.END)))


def job(world: int = 4, accumulation: int = 1, loop: str = "deepspeed", **settings: Any) -> JobSpec:
    fields = {"dtype": "bfloat16", "overlap_comm": settings.get("stage") == 3, "reduce_bucket_size": 5000, **settings}
    offloaded = fields.get("offload_optimizer", "none") != "none"
    optimizer = OptimizerSpec("adamw", "cpu" if offloaded else "deepspeed_fused")
    launch = LaunchSpec("deepspeed", (), ".", "train.py", nproc_per_node=world)
    return JobSpec(launch, ModelSpec("m"), loop=loop, strategy="zero", gradient_accumulation_steps=accumulation,
                   optimizer=optimizer, zero=ZeroSpec(**fields))  # fmt: skip


def events_of(job_: JobSpec, trace: StepTrace, rank: int = 0) -> tuple[MemoryEvent, ...]:
    card = replace(device("a100-80-sxm"), cublas_workspace_bytes=0)
    return zero.schedule(job_, trace, (rank,), card).events


def live_at_end(events: tuple[MemoryEvent, ...]) -> Counter[str]:
    live = {e.handle: e for e in events if e.op is Op.ALLOC}
    for e in events:
        if e.op is Op.FREE:
            del live[e.handle]
    totals: Counter[str] = Counter()
    for e in live.values():
        totals[e.label] += e.nbytes
    return totals


# ------------------------------------------------------------------------------------------------ layout
@pytest.mark.parametrize("seed", range(20))
def test_members_cover_the_group(seed: int) -> None:
    """Slices of all ranks are the group, each once; whole_numel counts every touched parameter whole."""
    rng = random.Random(seed)
    numel = [rng.randint(1, 300) for _ in range(rng.randint(1, 12))]
    world = rng.choice([1, 2, 3, 8, 64])
    group = FlatGroup(list(range(len(numel))), numel, world)
    assert group.padded % (2 * world) == 0 and 0 <= group.padded - group.total < 2 * world
    seen = Counter({i: 0 for i in range(len(numel))})
    for rank in range(world):
        members = group.members(rank)
        assert sum(s.numel for s in members) == group.owned_numel(rank) <= group.size
        assert sum(numel[s.param] for s in members) == group.whole_numel(rank)
        assert all((rank, s.numel) in group.cuts(s.param) for s in members)
        for s in members:
            seen[s.param] += s.numel
    assert [seen[i] for i in range(len(numel))] == numel


def test_round_robin_reorders_by_world() -> None:
    assert round_robin([0, 1, 2, 3, 4], 2) == [0, 2, 4, 1, 3]
    assert round_robin([0, 1], 8) == [0, 1]


@pytest.mark.parametrize("seed", range(10))
def test_rank_groups_never_understate(seed: int) -> None:
    """Every rank once, each with a representative that holds at least as much; the worst and the last rank stand for themselves."""
    rng = random.Random(seed)
    numel = [rng.choice([10, 100, 5000]) for _ in range(rng.randint(1, 20))]
    world = rng.choice([1, 2, 7, 32])
    groups = [FlatGroup(list(range(len(numel))), numel, world)]
    found = rank_groups(groups, world)
    assert sorted(r for g in found for r in g) == list(range(world))
    weight = groups[0].whole_numel
    assert all(weight(g[0]) >= weight(r) for g in found for r in g)
    assert {0, world - 1} <= {g[0] for g in found} and len(found) <= 3


def test_sixteen_thousand_ranks() -> None:
    found = zero.representatives(job(world=16384, stage=2), stack([50_000] * 100))
    assert len(found) <= 3 and sum(len(g) for g in found) == 16384


def test_stages_0_and_3_treat_ranks_alike() -> None:
    for stage in (0, 3):
        assert zero.representatives(job(stage=stage), stack([10])) == [(0, 1, 2, 3)]


# ------------------------------------------------------------------------------------------------ schedules
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("changes", [{}, {"contiguous_gradients": False}, {"reduce_scatter": False}, {"grad_accum_dtype": "float32"}])
def test_nothing_leaks(stage: int, accumulation: int, offload: str, changes: dict[str, Any]) -> None:
    """Every handle is freed at most once, and the second and third idle phase hold the same bytes."""
    if stage == 0 and (offload != "none" or changes):
        pytest.skip("stage 0 has neither")
    events = events_of(job(accumulation=accumulation, stage=stage, offload_optimizer=offload, **changes), stack([400, 5000, 7000, 33]))
    live: dict[int, int] = {}
    idle = []
    for e in events:
        if e.op is Op.ALLOC:
            assert e.handle not in live
            live[e.handle] = e.nbytes
        elif e.op is Op.FREE:
            live.pop(e.handle)
        elif e.op is Op.PHASE and e.label == "idle":
            idle.append(sum(live.values()))
    assert len(idle) == 3 and idle[1] == idle[2]


def test_what_stays_in_stage_2() -> None:
    """2 bytes for every parameter, 12 for the partition."""
    live = live_at_end(events_of(job(stage=2), stack([400, 600])))
    assert live == {"flat bf16 parameters": 2000, "fp32 master partition": 1000, "exp_avg": 1000, "exp_avg_sq": 1000, "overflow flag": 4}


def test_what_stays_in_stage_3() -> None:
    """Each parameter is padded on its own; the ipg bucket and the averaged gradients stay for good."""
    live = live_at_end(events_of(job(stage=3, stage3_param_persistence_threshold=0), stack([401, 600])))
    q = 101 + 150
    assert live == {"bf16 partition": 2 * q, "fp32 master partition": 4 * q, "averaged gradients": 2 * q, "exp_avg": 4 * q,
                    "exp_avg_sq": 4 * q, "ipg bucket": 10_000, "overflow flag": 5}  # fmt: skip


def test_persistent_parameters_stay_whole() -> None:
    live = live_at_end(events_of(job(stage=3, stage3_param_persistence_threshold=500), stack([401, 600])))
    assert live["persistent parameters"] == 2 * 404


def test_offload_moves_states_to_pinned_host_memory() -> None:
    """Each pinned buffer is a power of two; moments are pageable."""
    schedule = zero.schedule(job(stage=2, offload_optimizer="cpu"), stack([400, 600]), (0,), device("a100-80-sxm"))
    host = {h.name: h.bytes_by_label for h in schedule.host}
    assert host["step_2"]["fp32 master partition"] == 1024 and host["step_2"]["exp_avg"] == 1000
    assert "fp32 master partition" not in live_at_end(schedule.events)


def test_gathers_are_not_activations() -> None:
    events = events_of(job(stage=3, stage3_param_persistence_threshold=0), stack([400, 600]))
    by_label = {e.label: e.category for e in events if e.op is Op.ALLOC}
    assert by_label["gathered parameters"] is Category.PARAMETERS
    assert by_label["all-gather"] is by_label["ipg bucket"] is by_label["reduce copy"] is Category.COMMUNICATION
    assert by_label["fp32 master partition"] is by_label["exp_avg"] is Category.OPTIMIZER_STATES


def test_trainer_splits_weight_decay_groups() -> None:
    """The HF Trainer's own optimizer has two groups, each flattened and padded by itself."""
    trace = stack([401, 601])
    trace = replace(trace, params=(trace.params[0], replace(trace.params[1], name="layer1.bias")))
    own = replace(job(stage=2, loop="trainer"), optimizer=OptimizerSpec("adamw", "fused"))
    assert live_at_end(events_of(own, trace))["flat bf16 parameters"] == 2 * (408 + 608)
    assert live_at_end(events_of(job(stage=2, loop="trainer"), trace))["flat bf16 parameters"] == 2 * 1008


@pytest.mark.parametrize(("stage", "buckets"), [(2, {20_000: 2}), (3, {10_000: 1, 20_000: 1})])
def test_torch_autocast_has_a_bucket_per_dtype(stage: int, buckets: dict[int, int]) -> None:
    """Linear layers communicate in the autocast dtype, the rest in float32. ZeRO-2's buffers are float32 both, ZeRO-3's of either dtype."""
    trace = stack([400, 600])
    trace = replace(trace, modules=(*trace.modules[:2], replace(trace.modules[2], cls="LayerNorm")))
    autocast = replace(job(stage=stage, dtype="float32", torch_autocast=True), precision=Precision(autocast="bfloat16"))
    events = events_of(autocast, trace)
    first = events[: next(i for i, e in enumerate(events) if e.label == "step_1")]
    assert Counter(e.nbytes for e in first if e.op is Op.ALLOC and e.label == "ipg bucket") == buckets


def test_nothing_trainable_is_said() -> None:
    with pytest.raises(InputError, match="no parameter"):
        events_of(job(stage=2), stack([10], frozen=frozenset({0})))


# ------------------------------------------------------------------------------------------------ the coordinator
class _Counting:
    """Counts gathered elements."""

    def __init__(self, numel: list[int]) -> None:
        self.numel, self.now, self.peak = numel, 0, 0

    def gather(self, params: Any) -> Flight:
        self.now += sum(self.numel[p] for p in params)
        self.peak = max(self.peak, self.now)
        return Flight(list(params), ())

    def arrive(self, flight: Flight) -> None: ...

    def land(self, flight: Flight) -> None: ...

    def release(self, param: int) -> None:
        self.now -= self.numel[param]


def peaks(prefetch: int, max_live: int, max_reuse: int, layers: int = 10, n: int = 100) -> list[int]:
    """Most elements gathered in each of three iterations of a chain of layers."""
    numel = [n] * layers
    memory = _Counting(numel)
    coordinator = Coordinator(memory, [[i] for i in range(layers)], numel, [False] * layers, [True] * layers, prefetch, max_live, max_reuse)
    found = []
    for _ in range(3):
        memory.peak = memory.now
        coordinator.reset_step()
        for i in range(layers):
            coordinator.fetch(i, True, False)
            coordinator.release(i, True)
        for i in reversed(range(layers)):
            coordinator.fetch(i, False, False)
            coordinator.release(i, False)
        coordinator.release_leftovers()
        found.append(memory.peak)
        assert memory.now == 0
    return found


@pytest.mark.parametrize(
    ("prefetch", "max_live", "max_reuse", "expected"),
    [
        (0, 10**9, 10**9, 1000),  # kept until the backward that is near: the whole model
        (50, 10**9, 10**9, 1000),
        (0, 10**9, 0, 100),  # nothing is near: one layer
        (0, 200, 10**9, 1000),  # max_live alone frees nothing
        (50, 300, 0, 300),
    ],
)
def test_working_set(prefetch: int, max_live: int, max_reuse: int, expected: int) -> None:
    """The first iteration records and holds one layer at a time; the settings count from the second on."""
    assert peaks(prefetch, max_live, max_reuse) == [100, expected, expected]


def test_recomputed_layers_keep_their_gathered_weights() -> None:
    """A non-reentrant checkpoint saves what it recomputes: the recomputed weight lives beside the one that backward gathers."""

    def gathered_peak(recompute: bool) -> int:
        live: dict[int, int] = {}
        most = 0
        for e in events_of(job(stage=3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0,
                               stage3_max_reuse_distance=0), stack([400, 600], recompute)):  # fmt: skip
            if e.op is Op.ALLOC and e.label == "gathered parameters":
                live[e.handle] = e.nbytes
                most = max(most, sum(live.values()))
            elif e.op is Op.FREE:
                live.pop(e.handle, 0)
        return most

    assert gathered_peak(False) == 1200 and gathered_peak(True) == 2400
