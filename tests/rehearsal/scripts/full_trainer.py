"""A Trainer over several cards, all weights trained. `check` reads it, `rehearse` runs it."""

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

arguments = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
model = AutoModelForCausalLM.from_pretrained("tiny-llama", dtype=torch.bfloat16)
row = {name: torch.ones(1024, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
Trainer(model=model, args=arguments, train_dataset=[row] * 64).train()
