"""What the FSDP suites share: a case as launchguard's readers would give it, the replay in bytes as requested, and the comparison."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from launchguard.events import MemoryEvent, Op
from launchguard.job import DdpSpec, FsdpSpec, JobSpec, LaunchSpec, LoraSpec, ModelSpec, OptimizerSpec, Precision, QuantizationSpec
from launchguard.profiles import device
from launchguard.strategies import ddp, fsdp1, fsdp2

ROOT = Path(__file__).parents[2]
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
WRAP = {"layers": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP", "peft": "TRANSFORMER_BASED_WRAP"}


def run_cases(worker: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Every case through the real code, in one worker process; sorted so that the process changes place rarely."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(worker)), str(folder / "cases.json"), str(folder / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)  # wall-clock, on a loaded machine, too
    assert (folder / "out").exists(), done.stderr[-3000:]
    results: list[dict[str, Any]] = pickle.loads((folder / "out").read_bytes())
    return results


def name_of(case: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in case.items() if k != "kind") or "plain"


def job_of(case: dict[str, Any]) -> JobSpec:
    """The case as a JobSpec."""
    if case["kind"] == "ddp":
        spec = DdpSpec(
            gradient_as_bucket_view=case["view"], static_graph=case["static"], find_unused_parameters=case["unused"], comm_hook=case["hook"]
        )
        return JobSpec(
            LaunchSpec("torchrun", (), ".", "train.py"), ModelSpec("tiny"), strategy="ddp", gradient_accumulation_steps=case["gas"],
            optimizer=OptimizerSpec("adamw", "fused"), ddp=spec,
        )  # fmt: skip
    if case["kind"] == "dp":
        return JobSpec(
            LaunchSpec("python", (), ".", "train.py"), ModelSpec("tiny"), strategy="data_parallel", cards=case["cards"], loop="trainer",
            gradient_accumulation_steps=case["gas"], optimizer=OptimizerSpec("adamw", "fused"), outputs_alive_in_backward=case["kept"],
        )  # fmt: skip
    return _sharded_job(case)


def _sharded_job(case: dict[str, Any]) -> JobSpec:
    split = case["replicate"] > 1
    spec = FsdpSpec(
        version=int(case["kind"][-1]), sharding_strategy=case["strategy"], reshard_after_forward=case["reshard"],
        wrap_policy=WRAP[case["wrap"]], min_num_params=5000, use_orig_params=case["orig"], backward_prefetch=case["prefetch"],
        forward_prefetch=case["forward_prefetch"], offload_params=case["offload"], sync_module_states=case["sync_states"],
        accelerate_grouping=case["grouping"], sync_each_batch=case["sync"], limit_all_gathers=case["limit"],
        shard_group_size=case["world"] // case["replicate"] if split else None,
    )  # fmt: skip
    precision = Precision(
        load=case["load"] or case["storage"], storage=case["storage"], compute=case["compute"],
        reduce=case["reduce"] if case["compute"] != case["storage"] else case["compute"],
    )  # fmt: skip
    return JobSpec(
        LaunchSpec("torchrun", (), ".", "train.py", nproc_per_node=case["world"]), ModelSpec("tiny"), strategy=case["kind"],
        gradient_accumulation_steps=case["gas"], precision=precision, optimizer=OptimizerSpec("adamw", "fused"), fsdp=spec,
        lora=LoraSpec(autocast_adapter_dtype=False) if case["lora"] else None,
        quantization=QuantizationSpec("nf4", double_quant=True, quant_storage=case["quant"]) if case["quant"] else None,
        loop="trainer" if case["wrap"] == "peft" else "torch",
    )  # fmt: skip


@dataclasses.dataclass
class Phase:
    peak: int
    end: int
    streams: list[int] = dataclasses.field(default_factory=list)  # peaks of the streams' own bytes, largest first


def replay(events: tuple[MemoryEvent, ...]) -> dict[str, Phase]:
    """Peak and end of each phase, and the peaks by stream, in bytes as requested (no allocator). A phase that comes twice is one."""
    size: dict[int, tuple[int, int]] = {}
    live, phases, current = 0, {}, Phase(0, 0)
    by_stream: dict[int, int] = {}
    peaks: dict[str, dict[int, int]] = {}
    streams: dict[int, int] = {}
    for e in events:
        if e.op is Op.PHASE:
            current.end = live
            current = phases.setdefault(e.label, Phase(live, live))
            current.peak = max(current.peak, live)
            streams = peaks.setdefault(e.label, {})
            streams.update({s: max(n, streams.get(s, 0)) for s, n in by_stream.items()})
        elif e.op is Op.ALLOC or e.op is Op.FREE:
            nbytes, stream = (e.nbytes, e.stream) if e.op is Op.ALLOC else size.pop(e.handle)
            if e.op is Op.ALLOC:
                size[e.handle] = (nbytes, stream)
            change = nbytes if e.op is Op.ALLOC else -nbytes
            live += change
            by_stream[stream] = by_stream.get(stream, 0) + change
            current.peak = max(current.peak, live)
            streams[stream] = max(streams.get(stream, 0), by_stream[stream])
    current.end = live
    for name, phase in phases.items():
        phase.streams = sorted((n for n in peaks[name].values() if n), reverse=True)
    return phases


def merged(rows: list[dict[str, Any]]) -> dict[str, Phase]:
    """The worker's rows by phase name."""
    phases: dict[str, Phase] = {}
    for r in rows:
        p = phases.setdefault(r["phase"], Phase(0, 0))
        p.peak, p.end = max(p.peak, r["peak"]), r["end"]
        width = max(len(p.streams), len(r["streams"]))
        padded = [[*s, *[0] * (width - len(s))] for s in (p.streams, r["streams"])]
        p.streams = [max(pair) for pair in zip(*padded)]
    return phases


def compare(result: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """(phase, quantity, predicted bytes, real bytes)."""
    case, trace = result["case"], result["trace"]
    card = dataclasses.replace(device("a100-80-sxm"), cublas_workspace_bytes=0)
    module = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}[case["kind"]]
    ours = replay(module.schedule(job_of(case), trace, (case["rank"],), card).events)
    real = merged(result["phases"])
    for name, phase in real.items():
        if (case["kind"], name) != ("ddp", "prepare"):  # ddp_worker.py leaves the initial broadcast out
            yield name, "peak", ours[name].peak, phase.peak
        yield name, "end", ours[name].end, phase.end
        if case["kind"] == "fsdp2":  # FSDP1's flat gradients are made on a stream that fakes cannot see (fsdp_worker.py)
            for k, (predicted, peak) in enumerate(zip_longest(ours[name].streams, phase.streams, fillvalue=0)):
                yield name, f"stream {k}", predicted, peak


def check(result: dict[str, Any], tolerance: int, table: list[Any]) -> None:
    """Fill the table of residuals and fail where one is above the tolerance."""
    assert not result["error"], result["error"]
    wrong = []
    for phase, quantity, ours, real in compare(result):
        table.append((result["label"], phase, quantity, ours, real))
        if abs(ours - real) > tolerance:
            wrong.append(f"{phase} {quantity}: predicted {ours}, real {real}, residual {ours - real:+d}")
    assert not wrong, "\n".join(wrong)
