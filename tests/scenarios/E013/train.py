import transformers


def safe_save_model_for_hf_trainer(trainer, output_dir):
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        trainer._save(output_dir, state_dict=cpu_state_dict)


args, = transformers.HfArgumentParser((transformers.TrainingArguments,)).parse_args_into_dataclasses()
model = transformers.AutoModelForCausalLM.from_pretrained(args.model_name_or_path, torch_dtype="float32")
trainer = transformers.Trainer(model=model, args=args)
trainer.train()
safe_save_model_for_hf_trainer(trainer, args.output_dir)
