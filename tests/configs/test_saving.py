"""Whether a Trainer's job saves, and as what."""

from __future__ import annotations

from typing import Any

import pytest

BASE = "train.py --model_name_or_path m --output_dir out --max_length 64"


def test_the_trainer_saves_by_default(work: Any) -> None:
    saving = work.resolve(f"python {BASE}").saving
    assert saving is not None and saving.optimizer
    assert not work.resolve(f"python {BASE} --save_only_model").saving.optimizer


def test_not_when_told_not_to(work: Any) -> None:
    assert work.resolve(f"python {BASE} --save_strategy no").saving is None
    work.write("train.py", "from transformers import Trainer\ntrainer = Trainer(model=m)\ntrainer.save_model()\n")
    job = work.resolve(f"python {BASE} --save_strategy no")
    assert job.saving is not None and not job.saving.optimizer and str(job.origin("saving.optimizer")) == "train.py:3"


@pytest.mark.parametrize(("version", "expected"), [(1, "FULL_STATE_DICT"), (2, "SHARDED_STATE_DICT")])
def test_state_dict_type_of_accelerate_follows_the_version(work: Any, version: int, expected: str) -> None:
    work.write("a.yaml", f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{fsdp_version: {version}}}\n")
    assert work.resolve(f"accelerate launch --config_file a.yaml {BASE}").fsdp.state_dict_type == expected


def test_state_dict_type_of_the_trainer(work: Any) -> None:
    line = f"torchrun --nproc_per_node 2 {BASE} --fsdp full_shard"
    assert work.resolve(line).fsdp.state_dict_type == "FULL_STATE_DICT"
    work.write("f.json", {"state_dict_type": "SHARDED_STATE_DICT"})
    job = work.resolve(f"{line} --fsdp_config f.json")
    assert job.fsdp.state_dict_type == "SHARDED_STATE_DICT" and str(job.origin("fsdp.state_dict_type")) == "f.json:state_dict_type"


def test_resuming_is_read(work: Any, codes: Any) -> None:
    job = work.resolve(f"python {BASE} --resume_from_checkpoint out/checkpoint-5")
    assert job.resume and "LG310" not in codes(job) and str(job.origin("resume")) == "command line:--resume_from_checkpoint"
    assert not work.resolve(f"python {BASE} --resume_from_checkpoint False").resume


def test_a_hand_written_loop_resumes_in_its_own_way(work: Any, codes: Any) -> None:
    work.write("loop.py", "from accelerate import Accelerator\naccelerator = Accelerator()\n")
    job = work.resolve("accelerate launch --num_processes 2 loop.py --model_name_or_path m --resume_from_checkpoint out")
    assert not job.resume and "LG310" in codes(job)


def test_data_loader_workers(work: Any) -> None:
    assert work.resolve(f"python {BASE} --dataloader_num_workers 4").dataloader_workers == 4
    assert work.resolve(f"python {BASE}").dataloader_workers == 0
