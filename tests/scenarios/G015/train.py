import deepspeed
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-14B", torch_dtype=torch.bfloat16)
engine, _, _, _ = deepspeed.initialize(model=model, config="ds.json")
