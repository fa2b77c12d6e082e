"""Which micro-batches are on the device when a forward begins: strategies/_loop.py:InputFeed against real loops of transformers.Trainer and
Accelerate on the CPU. There a batch is not copied to its device; the copy is put back (accelerate.data_loader.send_to_device clones), and
the clones that live are counted."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from launchguard.events import ModuleInfo, Op, StepTrace, TraceEvent, TraceOp
from launchguard.job import JobSpec, LaunchSpec, ModelSpec
from launchguard.profiles import device
from launchguard.strategies import single

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

BATCH, LENGTH, ITEM, STEPS = 2, 8, 8, 3
ONE = BATCH * LENGTH * ITEM  # bytes of input_ids, and of labels


class Copies:
    """Clones of what send_to_device is given, as a device would hold them."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []
        self.seen: list[int] = []

    def send(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = {k: v.clone() for k, v in batch.items()}
        self.refs += [weakref.ref(t) for t in out.values()]
        return out

    def count(self, *args: Any) -> None:
        alive = [t for t in (r() for r in self.refs) if t is not None]
        self.seen.append(sum(t.numel() * t.element_size() for t in alive))


def model(copies: Copies) -> Any:
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=32,
                                      use_cache=False)  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    made.register_forward_pre_hook(copies.count)
    return made


def items(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": torch.ones(LENGTH, dtype=torch.int64), "labels": torch.ones(LENGTH, dtype=torch.int64)} for _ in range(count)]


def trainer_loop(copies: Copies, gas: int, folder: Path) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=STEPS,
        per_device_train_batch_size=BATCH, gradient_accumulation_steps=gas,
    )  # fmt: skip
    transformers.Trainer(model(copies), args, train_dataset=items(BATCH * gas * STEPS)).train()


def accelerate_loop(copies: Copies, gas: int, folder: Path) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=gas)
    made = model(copies)
    loader = torch.utils.data.DataLoader(items(BATCH * gas * STEPS), batch_size=BATCH)
    made, optimizer, loader = accelerator.prepare(made, torch.optim.SGD(made.parameters()), loader)
    for batch in loader:
        with accelerator.accumulate(made):
            accelerator.backward(made(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def predicted(loop: str, gas: int) -> list[int]:
    """Bytes labelled inputs when each forward begins."""
    order = [TraceOp.FORWARD, TraceOp.ALLOC, TraceOp.ALLOC, TraceOp.BACKWARD, TraceOp.END, TraceOp.FREE, TraceOp.FREE]
    storages = [0, 1, 2, 0, 0, 1, 2]
    events = [TraceEvent(op, storage, ONE if op is TraceOp.ALLOC else 0) for op, storage in zip(order, storages)]
    trace = StepTrace((), (ModuleInfo("", "Model", -1),), (), tuple(events), inputs=(1, 2))
    job = JobSpec(LaunchSpec("python", (), ".", "train.py"), ModelSpec("tiny"), loop=loop, gradient_accumulation_steps=gas)
    live, held, found = 0, {}, []
    for e in single.schedule(job, trace, (0,), device("a100-80-sxm")).events:
        if e.op is Op.ALLOC and e.label == "inputs":
            held[e.handle] = e.nbytes
            live += e.nbytes
        elif e.op is Op.FREE:
            live -= held.pop(e.handle, 0)
        elif e.op is Op.PHASE and e.label.startswith("forward"):
            found.append(live)
    return found


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_micro_batches_on_the_device(
    loop: str, gas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residuals: list[Any]
) -> None:  # fmt: skip
    copies = Copies()
    monkeypatch.setattr(accelerate.data_loader, "send_to_device", copies.send)
    (trainer_loop if loop == "trainer" else accelerate_loop)(copies, gas, tmp_path)
    ours = predicted(loop, gas)
    residuals += [(f"inputs {loop} {gas}", f"forward {i}", "live", a, b) for i, (a, b) in enumerate(zip(ours, copies.seen))]
    assert ours == copies.seen
