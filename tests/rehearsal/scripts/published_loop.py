"""The loops of two published measurements: `published_loop.py KIND JSON`. Prints PEAK allocated reserved.

a6000: README table of vramcalc 0.1.2 (torch 2.14.1, transformers 4.57.6; b=1 s=2048): AdamW foreach, SDPA pinned to flash or
memory-efficient, gradients kept (set_to_none=False), the outputs alive through backward, peak of the steps after the first.
t4: measured_peaks.json of torch-preflight 0.5 (torch 2.11): autocast, AdamW, second step.
"""

import contextlib
import json
import sys

import torch
import transformers as T
from torch.nn.attention import SDPBackend, sdpa_kernel


def pinned(attention: str) -> contextlib.AbstractContextManager[None]:
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]) if attention == "sdpa" else contextlib.nullcontext()


def a6000(row: dict) -> None:
    config = T.AutoConfig.for_model(**row["config"])
    config._attn_implementation = row["attention"]
    model = T.AutoModelForCausalLM.from_config(config, dtype=torch.float32 if row["precision"] == "amp" else torch.bfloat16)
    model.tie_weights()
    model = model.cuda()
    if row["lora"]:
        import peft

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        lora = peft.LoraConfig(r=row["lora"], lora_alpha=row["lora"], lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    ids = torch.zeros(1, 2048, dtype=torch.long, device="cuda")
    model.train()
    if row["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, foreach=True)
    peaks = []
    for _ in range(3):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with pinned(row["attention"]):
            with torch.autocast("cuda", torch.bfloat16, enabled=row["precision"] == "amp"):
                out = model(input_ids=ids, labels=ids, use_cache=False)
                loss = out.loss
            loss.backward()
        del out, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        peaks.append(torch.cuda.max_memory_allocated())
    print("PEAK", max(peaks[1:]), torch.cuda.max_memory_reserved(), flush=True)


def t4(row: dict) -> None:
    model = getattr(T, row["task"]).from_config(T.AutoConfig.for_model(**row["config"])).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.zeros(row["batch"], row["seq"], dtype=torch.long, device="cuda")
    for i in range(2):
        if i == 1:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            lm = row["task"].endswith("LM")
            out = model(input_ids=ids, labels=ids) if lm else model(input_ids=ids)
            loss = out.loss if lm else out.last_hidden_state.pow(2).mean()
        loss.backward()
        optimizer.step()
    print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)


with open(sys.argv[2]) as file:
    {"a6000": a6000, "t4": t4}[sys.argv[1]](json.load(file))
