"""Save, then load what was saved, in one run: `saves.py KIND`."""

import os
import sys

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1024}
row = {"input_ids": torch.ones(64, dtype=torch.long), "labels": torch.ones(64, dtype=torch.long)}
batch = {name: value[None].expand(2, -1) for name, value in row.items()}


def build(device="cpu"):
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_key_value_heads=2)).to(device)


def steps(model, optimizer, count=1):
    for _ in range(count):
        model(**{name: value.cuda() for name, value in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def plain():
    model = build("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, "last.pt")
    model.save_pretrained("hub")
    loaded = torch.load("last.pt", map_location="cuda", weights_only=True)
    assert loaded["step"] == 1
    again = AutoModelForCausalLM.from_pretrained("hub").cuda()
    again.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(again.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    steps(again, optimizer)


def trainer():
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("out", max_steps=1, save_steps=1, per_device_train_batch_size=2, report_to=[])
    Trainer(build(), arguments, train_dataset=[row] * 8).train()
    arguments = TrainingArguments("out", max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[])
    again = Trainer(build(), arguments, train_dataset=[row] * 8)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and sorted(os.listdir("out")) == ["checkpoint-1", "checkpoint-2"]


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = build()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader([row] * 8, batch_size=2))
    for i, data in enumerate(loader):
        accelerator.backward(model(**data).loss)
        optimizer.step()
        optimizer.zero_grad()
        if i == 0:
            accelerator.save_state("state")
            accelerator.load_state("state")


def distributed():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = build("cuda")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id="sharded")
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id="sharded")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    steps(model, optimizer)


def deepspeed():
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=build(), config=config)
    for i in range(2):
        engine.backward(engine(**{name: value.cuda() for name, value in batch.items()}).loss)
        engine.step()
        if i == 0:
            engine.save_checkpoint("zero")
            assert engine.load_checkpoint("zero")[0]


{"plain": plain, "trainer": trainer, "accelerate": accelerate, "distributed": distributed, "deepspeed": deepspeed}[sys.argv[-1]]()
