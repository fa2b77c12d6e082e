from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

args, = HfArgumentParser((SFTConfig,)).parse_args_into_dataclasses()
trainer = SFTTrainer(model="gpt2", args=args)
trainer.train()
