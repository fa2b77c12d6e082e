import deepspeed
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2").to("cuda:0")
engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds.json")
