import argparse

from accelerate import Accelerator
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", type=str, default="no", choices=["no", "fp16", "bf16"])
parser.add_argument("--train_batch_size", type=int, default=4)
args = parser.parse_args()
accelerator = Accelerator(mixed_precision=args.mixed_precision)
model = AutoModelForCausalLM.from_pretrained("gpt2")
