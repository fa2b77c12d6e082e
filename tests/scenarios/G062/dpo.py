from trl import DPOConfig, DPOTrainer

args = DPOConfig(output_dir="Qwen2.5-0.5B-DPO")
trainer = DPOTrainer(model="Qwen/Qwen2.5-0.5B", args=args, train_dataset=dataset)
trainer.train()
