"""Adapters on a whole and on a 4-bit base, sharded: the prediction against the real bitsandbytes, DeepSpeed, FSDP and Trainer on a virtual
card, phase by phase. (A fake tensor cannot be of bitsandbytes' class, and under ZeRO-3 its kernels abort on a fake device.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import FIRST_RANK, Rehearsed

PHASES = ("prepare", "forward_1", "backward_1", "step_1", "forward_2", "backward_2", "step_2", "idle")
# a large block is given whole where less than 1 MiB of it would be left, which is a matter of what was freed before: some MiB of 300
ALLOCATED, SCALARS = 0.015, 64 * 1024
CHECKPOINTING = ("--gradient_checkpointing", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}')
ZERO3 = ("deepspeed", "--num_gpus", "2"), ("--deepspeed", "zero3_small.json")
FSDP1 = ("accelerate", "launch", "--config_file", "fsdp1.yaml"), ()
FSDP2 = ("accelerate", "launch", "--config_file", "fsdp2.yaml"), ()

CASES = {
    "zero3-lora": (*ZERO3, "lora_trainer.py", ()),
    "zero3-4bit": (*ZERO3, "qlora_trainer.py", ()),
    "zero3-4bit-checkpointing": (*ZERO3, "qlora_trainer.py", CHECKPOINTING),
    "zero3-4bit-accumulation": (*ZERO3, "qlora_trainer.py", ("--gradient_accumulation_steps", "2")),
    "fsdp1-4bit": (*FSDP1, "qlora_trainer.py", ()),
    "fsdp2-lora": (*FSDP2, "lora_trainer.py", ()),
    "fsdp2-4bit": (*FSDP2, "qlora_trainer.py", ()),
}


@pytest.mark.parametrize("name", CASES)
def test_phases(both: Callable[..., tuple[Rehearsed, Rehearsed]], name: str) -> None:
    launcher, options, script, more = CASES[name]
    command = [*launcher, script, *options, "--bf16", "--per_device_train_batch_size", "2", "--output_dir", "out", *more]
    check, run = both(command, device="a100-80-sxm", seq_len=1024, options=FIRST_RANK)
    wrong = []
    for phase in PHASES:
        ours, real = (side.phases()[phase]["allocated_bytes"] for side in (check, run))
        if abs(ours - real) > max(ALLOCATED * real, SCALARS):
            wrong.append(f"{phase}: predicted {ours}, real {real}, residual {ours - real:+d}")
    assert not wrong, "\n".join(wrong)
