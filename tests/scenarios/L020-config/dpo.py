from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

peft_config = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn"])
model = AutoModelForCausalLM.from_pretrained("gpt2")
args = DPOConfig(output_dir="out", per_device_train_batch_size=1)
trainer = DPOTrainer(model=model, args=args)
trainer.train()
