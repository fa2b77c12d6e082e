"""One optimizer step of a tiny Llama with the DeepSpeed engine; on a machine without GPUs it runs on the CPU (gloo)."""

import argparse

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model_name_or_path))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    ids = torch.randint(256, (engine.train_micro_batch_size_per_gpu(), args.block_size), device=engine.device)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    print(f"rank {engine.global_rank}: step {engine.global_steps} done, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
