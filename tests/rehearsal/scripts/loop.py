"""A hand-written loop that keeps its outputs, under autocast."""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path")
parser.add_argument("--batch_size", type=int)
parser.add_argument("--seq_len", type=int)
args = parser.parse_args()
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model_name_or_path), dtype=torch.float32).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    ids = torch.zeros(args.batch_size, args.seq_len, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        outputs = model(input_ids=ids, labels=ids)
        loss = outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
