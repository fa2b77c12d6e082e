"""QLoRA over several cards, as recipes write it: a 4-bit base, adapters by hand, the Trainer. `check` reads it, `rehearse` runs it."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments

arguments = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
how = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_quant_storage=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained("tiny-llama", quantization_config=how, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
row = {name: torch.ones(1024, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
Trainer(model=model, args=arguments, train_dataset=[row] * 64).train()
