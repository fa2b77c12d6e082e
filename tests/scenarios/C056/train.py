from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2")
args = TrainingArguments(output_dir="out", bf16=True, per_device_train_batch_size=1)
Trainer(model=model, args=args).train()
