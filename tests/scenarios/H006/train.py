import deepspeed
from transformers import AutoModelForCausalLM

with deepspeed.zero.Init():
    model = AutoModelForCausalLM.from_pretrained("gpt3-6.7b")
engine, _, _, _ = deepspeed.initialize(model=model, config="ds.json")
