"""What is on the card after set-up: the real Trainer with DDP, FSDP and DeepSpeed on a virtual card against the prediction.

What a Trainer does before the wrapping call is `load` on one side and `prepare` on the other; their higher peak is compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FIRST_RANK, SCRIPTS, Rehearsed

ALLOCATED, SCALARS = 0.001, 16 * 1024
CASES = {
    "ddp": (("torchrun", "--nproc_per_node", "2"), ()),
    "fsdp1": (("accelerate", "launch", "--config_file", "fsdp1.yaml"), ()),
    "fsdp2": (("accelerate", "launch", "--config_file", "fsdp2.yaml"), ()),
    "zero2": (("deepspeed", "--num_gpus", "2"), ("--deepspeed", "zero2.json")),
    "zero3": (("deepspeed", "--num_gpus", "2"), ("--deepspeed", "zero3_small.json")),
}


@pytest.mark.parametrize("name", CASES)
def test_set_up(both: Callable[..., tuple[Rehearsed, Rehearsed]], name: str, tmp_path: Path) -> None:
    launcher, options = CASES[name]
    zero2 = json.loads((SCRIPTS / "zero3_small.json").read_text())
    zero2["zero_optimization"] = {"stage": 2, "reduce_bucket_size": 100000}
    (tmp_path / "zero2.json").write_text(json.dumps(zero2))
    options = tuple(str(tmp_path / o) if o == "zero2.json" else o for o in options)
    command = [*launcher, "full_trainer.py", *options, "--bf16", "--per_device_train_batch_size", "2", "--output_dir", "out"]
    check, run = both(command, device="a100-80-sxm", seq_len=1024, options=FIRST_RANK)
    ours, real = (max(side.phases()[p]["allocated_bytes"] for p in ("load", "prepare") if p in side.phases()) for side in (check, run))
    assert abs(ours - real) <= max(ALLOCATED * real, SCALARS), (ours, real)


def test_fsdp1_offloaded_to_the_host(both: Callable[..., tuple[Rehearsed, Rehearsed]], tmp_path: Path) -> None:
    """Phase by phase: a fake device cannot take flat parameters to the host (tests/conformance/test_fsdp1.py), a virtual card can."""
    config = (SCRIPTS / "fsdp1.yaml").read_text().replace("fsdp_config:\n", "fsdp_config:\n  fsdp_offload_params: true\n")
    (tmp_path / "offload.yaml").write_text(config)
    command = ["accelerate", "launch", "--config_file", str(tmp_path / "offload.yaml"), "full_trainer.py",
               "--bf16", "--per_device_train_batch_size", "2", "--output_dir", "out"]  # fmt: skip
    check, run = both(command, device="a100-80-sxm", seq_len=1024, options=FIRST_RANK)
    for phase in ("prepare", "forward_1", "backward_1", "step_1", "forward_2", "backward_2", "step_2"):
        ours, real = (side.phases()[phase]["allocated_bytes"] for side in (check, run))
        assert abs(ours - real) <= SCALARS, (phase, ours, real)
