import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments

args, = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, torch_dtype=torch.bfloat16, quantization_config=quantization)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
trainer = Trainer(model=model, args=args)
trainer.train()
