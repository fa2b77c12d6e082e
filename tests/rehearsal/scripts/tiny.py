"""A plain loop on a two-layer GPT-2; prints what it sees, saves at the end."""

import os
import sys

import torch
import transformers

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 5
model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=2)).cuda().train()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.ones(2, 128, dtype=torch.long, device="cuda")
for _ in range(steps):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
os.makedirs("out", exist_ok=True)
torch.save(model.state_dict(), "out/model.pt")
with open("out/done.txt", "w") as file:
    file.write("done")
with open("out/done.txt") as file:
    assert file.read() == "done"
os.remove("precious.txt") if os.path.exists("precious.txt") else None
