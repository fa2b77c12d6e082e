"""A Trainer callback that refuses a run which will not fit, before its first step.

    trainer = Trainer(..., callbacks=[LaunchguardCallback(seq_len=4096)])

The prediction is made from the Trainer's own arguments and the model's config, in the main process of each node.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from launchguard import configs
from launchguard.errors import LaunchguardError
from launchguard.job import LaunchSpec
from launchguard.preflight import Outcome, predict
from launchguard.report.text import render_answer

# TrainingArguments that decide memory, passed on as the flags they would be on a command line
FLAGS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "gradient_checkpointing", "optim", "max_grad_norm",
    "deepspeed", "fsdp", "fsdp_config", "torch_compile", "use_liger_kernel",
)  # fmt: skip


class WouldExceed(RuntimeError):
    """The run was predicted not to fit; the text is the report's answer."""


class LaunchguardCallback(TrainerCallback):
    """on_exceed: "abort" raises WouldExceed before the first step, "warn" prints and goes on; seq_len: longest sequence in tokens;
    device: as --device; headroom: as --headroom. The last outcome is kept in `outcome`."""

    def __init__(self, *, seq_len: int | None = None, device: str = "auto", headroom: str = "10%", on_exceed: str = "abort") -> None:
        if on_exceed not in ("abort", "warn"):
            raise ValueError(f"on_exceed is {on_exceed!r}: give 'abort' or 'warn'")
        self.options = {"seq_len": seq_len, "device": device, "headroom": headroom}
        self.on_exceed = on_exceed
        self.outcome: Outcome | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not state.is_local_process_zero or model is None or not hasattr(model, "config"):
            return
        try:
            self.outcome = self._predict(args, model)
        except LaunchguardError as e:  # a guard that cannot tell must not stop a good run
            print(f"launchguard: cannot tell whether this run fits: {e.message}", flush=True)
            return
        if self.outcome.verdict.verdict == "fits":
            return
        text = render_answer(self.outcome.verdict, self.outcome.advice, color=False, width=120)
        if self.outcome.verdict.verdict == "exceeds" and self.on_exceed == "abort":
            raise WouldExceed(text)
        print(text, end="", flush=True)

    def _predict(self, args: Any, model: Any) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            config = model.config.to_dict()
            config["dtype"] = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
            Path(folder, "config.json").write_text(json.dumps(config, default=str))
            nproc = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
            spec = LaunchSpec(
                launcher="torchrun", argv=(), cwd=os.getcwd(), script=None, script_args=tuple(_flags(args)),
                nnodes=max(1, args.world_size // nproc), nproc_per_node=nproc, environment=_launcher_environment(),
            )  # fmt: skip
            options = {**self.options, "model": folder, "set": {"loop": "trainer"}}
            return predict(configs.resolve(spec, options))


def _launcher_environment() -> dict[str, str]:
    """What a launcher has told this process (Accelerate's plugin variables)."""
    return {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "PYTORCH_"))}


def _flags(args: Any) -> list[str]:
    flags: list[str] = []
    for name in FLAGS:
        value = getattr(args, name, None)
        if value in (None, False, "", [], {}):
            continue
        value = getattr(value, "value", value)
        if name == "fsdp" and isinstance(value, (list, tuple)):
            value = " ".join(str(getattr(v, "value", v)) for v in value)
        flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
