"""One optimizer step of a tiny Llama with Accelerate."""

import argparse

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=32)
    args = parser.parse_args()
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model_name_or_path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(256, (8, args.max_length))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=args.batch_size))
    batch = next(iter(loader))
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {accelerator.process_index}: step done, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
