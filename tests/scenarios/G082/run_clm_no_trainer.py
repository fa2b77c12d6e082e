from accelerate import Accelerator
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
optimizer = AdamW(model.parameters(), lr=5e-5)
