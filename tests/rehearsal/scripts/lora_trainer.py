"""LoRA over several cards, as recipes write it: adapters by hand, the Trainer. `check` reads it, `rehearse` runs it."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

arguments = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
model = AutoModelForCausalLM.from_pretrained("tiny-llama", dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
row = {name: torch.ones(1024, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
Trainer(model=model, args=arguments, train_dataset=[row] * 64).train()
