"""QLoRA as scripts write it: a 4-bit base from a folder, adapters, one card."""

import sys

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=how, device_map={"": 0})
assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit" and model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
ids = torch.ones(2, 64, dtype=torch.long, device="cuda")
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
