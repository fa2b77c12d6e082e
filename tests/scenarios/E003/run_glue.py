from transformers import AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

args, = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path)
trainer = Trainer(model=model, args=args, compute_metrics=metrics)
trainer.train()
