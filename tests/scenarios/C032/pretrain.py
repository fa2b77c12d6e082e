import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

accelerator = Accelerator()
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=quantization)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
