"""Trainer with an evaluation set, on a tiny Llama; every TrainingArguments flag is taken."""

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments

arguments = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
row = {"input_ids": torch.ones(64, dtype=torch.long), "labels": torch.ones(64, dtype=torch.long)}
Trainer(model=model, args=arguments, train_dataset=[row] * 64, eval_dataset=[row] * 8).train()
