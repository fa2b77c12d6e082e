"""Never run: `check` reads it. A Trainer script in the usual shape."""

from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

arguments, rest = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(return_remaining_strings=True)
model = AutoModelForCausalLM.from_pretrained("tiny-llama")
Trainer(model=model, args=arguments).train()
