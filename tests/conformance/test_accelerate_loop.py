"""What Accelerate puts round forward, as launchguard traces it, against the real Accelerator on the CPU: autocast and its cache of cast
weights, ConvertOutputsToFp32, gradients as they arrive. Bytes are those of the tensors that ops make, in forward, kept for backward, and
in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launchguard.events import StepTrace, TraceOp
from launchguard.job import InputTensor, JobSpec, LaunchSpec, ModelSpec, Precision
from launchguard.profiles import device
from launchguard.trace import trace_job

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")
import accelerate_models  # noqa: E402
from live_bytes import Live  # noqa: E402

LIMIT = "8 B"
ROWS = 64
CASES = [(name, precision, load) for name in ("Plain", "Repeated", "Checkpointed", "Frozen")
         for precision, load in (("no", "float32"), ("bf16", "float32"), ("bf16", "bfloat16"), ("no", "bfloat16"))]  # fmt: skip


def real(name: str, precision: str, load: str) -> dict[str, int]:
    """One micro-batch through the prepared model; gradients go as soon as they are there, as in a trace."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = getattr(accelerate_models, name)().to(getattr(torch, load))
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model = accelerator.prepare(model)
    with Live() as books:
        loss = model(torch.empty(ROWS, accelerate_models.WIDTH, dtype=getattr(torch, load))).float().sum()
        forward, kept = books.peak, books.live
        books.peak = books.live
        loss.backward()
    return {"forward peak": forward, "kept": kept, "backward peak": books.peak}


def predicted(name: str, precision: str, load: str) -> dict[str, int]:
    folder = str(Path(accelerate_models.__file__).parent)
    model = ModelSpec(f"accelerate_models:{name}", python_path=folder, loss="sum",
                      inputs={"x": InputTensor((ROWS, accelerate_models.WIDTH), load)})  # fmt: skip
    mixed = precision != "no"
    dtypes = Precision(load=load, storage=load, compute=load, autocast="bfloat16" if mixed else None, float32_outputs=mixed)
    job = JobSpec(LaunchSpec("accelerate", (), ".", "train.py"), model, loop="accelerate", precision=dtypes)
    return summed(trace_job(job, device("a100-80-sxm"), use_cache=False))


def summed(trace: StepTrace) -> dict[str, int]:
    size, live, peak, found = {}, 0, 0, {}
    for op, a, b in trace.events:
        if op is TraceOp.ALLOC:
            size[a] = b
            live += b
            peak = max(peak, live)
        elif op is TraceOp.FREE:
            live -= size.pop(a)
        elif op is TraceOp.BACKWARD:
            found = {"forward peak": peak, "kept": live}
            peak = live
    return {**found, "backward peak": peak}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_micro_batch(case: tuple[str, str, str], residuals: list[Any]) -> None:
    """To 8 bytes: the loss and its gradient."""
    ours, theirs = predicted(*case), real(*case)
    residuals += [(f"accelerate {'-'.join(case)}", "micro-batch", quantity, ours[quantity], theirs[quantity]) for quantity in theirs]
    assert {k: (ours[k], theirs[k]) for k in theirs if abs(ours[k] - theirs[k]) > 8} == {}
