"""What a script makes whole by itself to save it, read from its text."""

from __future__ import annotations

from typing import Any

import pytest

TRAINER = "from transformers import Trainer\ntrainer = Trainer(model=model, args=args)\ntrainer.train()\n"
FSDP1 = (
    "torchrun --nproc_per_node 2 train.py --model_name_or_path m --output_dir out --max_length 64 --fsdp full_shard --fsdp_config f.json"
)
HAND = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, FullStateDictConfig, StateDictType\n"
OFFLOADED = "FullStateDictConfig(offload_to_cpu=True, rank0_only=True)"


def saving_of(work: Any, text: str, line: str) -> Any:
    work.write("train.py", text)
    work.write("f.json", {"version": 1})
    return work.resolve(line)


@pytest.mark.parametrize("call", ["trainer.model.state_dict()", "trainer.model.save_pretrained('out')", "model.save_pretrained('out')"])
def test_a_state_dict_of_an_fsdp1_model_is_whole_on_every_device(work: Any, codes: Any, call: str) -> None:
    job = saving_of(work, TRAINER + call + "\n", FSDP1)
    assert job.saving.library and job.saving.script == "device" and "LG270" in codes(job)
    assert str(job.origin("saving.script")) == "train.py:4"


@pytest.mark.parametrize(
    "rest",
    [
        "tokenizer.save_pretrained('out')\n", "optimizer.state_dict()\n",
        "model.save_pretrained('out', state_dict=trainer.accelerator.get_state_dict(model))\n",
    ],
)  # fmt: skip
def test_what_gathers_nothing_on_the_device(work: Any, codes: Any, rest: str) -> None:
    job = saving_of(work, TRAINER + rest, FSDP1)
    assert job.saving.script in (None, "rank 0") and "LG270" not in codes(job)


def test_calls_before_the_model_is_wrapped_and_in_unused_functions_do_not_count(work: Any) -> None:
    assert saving_of(work, "model.save_pretrained('merged')\n" + TRAINER, FSDP1).saving.script is None
    unused = "def rescue(trainer):\n    return trainer.model.state_dict()\n"
    assert saving_of(work, unused + TRAINER, FSDP1).saving.script is None
    assert saving_of(work, unused + TRAINER + "rescue(trainer)\n", FSDP1).saving.script == "device"


def test_the_trainer_of_a_replicated_model_gathers_nothing(work: Any) -> None:
    job = saving_of(work, TRAINER + "trainer.model.state_dict()\n", FSDP1.partition(" --fsdp")[0])
    assert job.saving.script is None


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (f"with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, {OFFLOADED}):\n    s = model.state_dict()", "rank 0"),
        (f"cfg = {OFFLOADED}\nwith FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):\n    s = model.state_dict()", "rank 0"),
        ("with FSDP.state_dict_type(model, S.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):\n    s = model.state_dict()",
         "every host"),
        ("with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n    s = model.state_dict()", "device"),
        ("with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n    s = model.state_dict()", "sharded"),
        ("s = model.state_dict()", "device"),
    ],
)  # fmt: skip
def test_a_hand_written_fsdp1_loop(work: Any, save: str, expected: str) -> None:
    job = saving_of(work, f"{HAND}model = FSDP(model)\n{save}\n", "torchrun --nproc_per_node 2 train.py --model_name_or_path m")
    assert job.strategy == "fsdp1" and job.saving.script == expected and not job.saving.library


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        ("s = {k: v.full_tensor() for k, v in model.state_dict().items()}", "device"),
        ("s = {k: v.full_tensor().cpu() for k, v in model.state_dict().items()}", "rank 0"),
        ("s = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))", "device"),
        ("s = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))", "rank 0"),
        ("s = model.state_dict()", None),
    ],
)
def test_a_hand_written_fsdp2_loop(work: Any, save: str, expected: str | None) -> None:
    text = f"from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n{save}\n"
    saving = saving_of(work, text, "torchrun --nproc_per_node 2 train.py --model_name_or_path m").saving
    assert (saving.script if saving else None) == expected


def test_all_parameters_gathered_under_zero3(work: Any, codes: Any) -> None:
    work.write("ds.json", {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
    text = "import deepspeed\nengine = deepspeed.initialize(model=model)\n"
    text += "with deepspeed.zero.GatheredParameters(model.parameters()):\n    pass\n"
    line = "deepspeed --num_gpus 2 train.py --deepspeed_config ds.json --model_name_or_path m"
    assert saving_of(work, text, line).saving.script == "device"
    some = text.replace("model.parameters()", "list(module.parameters(recurse=False))")
    assert saving_of(work, some, line).saving is None
