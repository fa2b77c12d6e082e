from transformers import AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

args, = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
model = AutoModelForSequenceClassification.from_pretrained("bert")
trainer = Trainer(model=model, args=args)
trainer.train()
