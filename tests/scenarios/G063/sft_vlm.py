import torch
from transformers import AutoModelForImageTextToText, HfArgumentParser
from trl import SFTConfig, SFTTrainer

args, = HfArgumentParser((SFTConfig,)).parse_args_into_dataclasses()
model = AutoModelForImageTextToText.from_pretrained(args.model_name_or_path, torch_dtype=torch.bfloat16)
trainer = SFTTrainer(model=model, args=args)
trainer.train()
