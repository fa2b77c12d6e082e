from transformers import AutoModelForSeq2SeqLM, HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments

args, = HfArgumentParser((Seq2SeqTrainingArguments,)).parse_args_into_dataclasses()
model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)
trainer = Seq2SeqTrainer(model=model, args=args)
trainer.train()
