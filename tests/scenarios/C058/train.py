import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser
from trl import SFTConfig, SFTTrainer

args, = HfArgumentParser((SFTConfig,)).parse_args_into_dataclasses()
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=quantization)
SFTTrainer(model=model, args=args, peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"])).train()
