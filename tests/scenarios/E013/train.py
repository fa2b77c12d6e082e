import transformers

args, = transformers.HfArgumentParser((transformers.TrainingArguments,)).parse_args_into_dataclasses()
model = transformers.AutoModelForCausalLM.from_pretrained(args.model_name_or_path, torch_dtype="float32")
trainer = transformers.Trainer(model=model, args=args)
trainer.train()
