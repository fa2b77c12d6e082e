import deepspeed
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import SFTConfig, SFTTrainer

with deepspeed.zero.Init(config_dict_or_path="ds.json"):
    model = AutoModelForCausalLM.from_pretrained("gpt2")
args, = HfArgumentParser((SFTConfig,)).parse_args_into_dataclasses()
SFTTrainer(model=model, args=args).train()
