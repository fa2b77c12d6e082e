from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator(gradient_accumulation_steps=1)
model = AutoModelForCausalLM.from_pretrained("gpt2")
