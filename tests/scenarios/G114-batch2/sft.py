from transformers import HfArgumentParser
from trl import ModelConfig, SFTConfig, SFTTrainer

model_args, args = HfArgumentParser((ModelConfig, SFTConfig)).parse_args_into_dataclasses()
trainer = SFTTrainer(model=model_args.model_name_or_path, args=args)
trainer.train()
