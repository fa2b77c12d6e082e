from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator(gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained("gpt2")
