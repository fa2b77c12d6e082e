import transformers
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

args, = transformers.HfArgumentParser((SFTConfig,)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
trainer = SFTTrainer(model, args=args)
trainer.train()
