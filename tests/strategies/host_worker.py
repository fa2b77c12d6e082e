"""Main memory of a real process: anonymous bytes that it gains by loading, preparing and training a small model. Prints one JSON object.

    python host_worker.py CHECKPOINT_DIR DEEPSPEED_JSON

CHECKPOINT_DIR holds a bfloat16 Llama. Nothing here has a GPU, so what DeepSpeed keeps on its device is host memory, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", DS_ACCELERATOR="cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Trainer
from transformers.integrations import HfDeepSpeedConfig

MIB = 1 << 20


def anonymous() -> int:
    """Bytes of this process that no file backs, after what was freed has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def loaded(folder: str, **arguments: Any) -> int:
    before = anonymous()
    model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    gained = anonymous() - before
    del model
    return gained


def efficient(folder: str, local_rank: int) -> int:
    """from_pretrained under FSDP's cpu_ram_efficient_loading; the checkpoint is cast, so that what is read cannot be mapped."""
    flags = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "LOCAL_RANK": str(local_rank)}
    before = {name: os.environ.get(name) for name in flags}
    os.environ.update(flags)
    try:
        return loaded(folder, dtype=torch.float32)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def workers(count: int) -> int:
    """Bytes of each data loader worker that it does not share with the process it was forked from."""
    loader = torch.utils.data.DataLoader(list(range(4096)), batch_size=4, num_workers=count, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(64):
        next(iterator)
    private = 0
    for process in iterator._workers:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        private += sum(int(n) for n in re.findall(r"Private_Dirty:\s+(\d+)", text)) * 1024
    return private // count


def zero3(folder: str, config: dict[str, Any]) -> dict[str, int]:
    """zero.Init, deepspeed.initialize and three steps with optimizer and parameters on the host."""
    before = anonymous()
    keep = HfDeepSpeedConfig(config)  # from_pretrained looks for it
    model = AutoModelForCausalLM.from_pretrained(folder)
    gained = {"zero3 load": anonymous() - before}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    gained["zero3 prepare"] = anonymous() - before
    ids = torch.zeros(1, 16, dtype=torch.long)
    for _ in range(3):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    gained["zero3 step"] = anonymous() - before
    del keep, engine
    return gained


def main(folder: str, config: str) -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    assert Trainer
    found = {"process": anonymous(), "mapped": loaded(folder), "cast": loaded(folder, dtype=torch.float32),
             "efficient, rank 0": efficient(folder, 0), "efficient, rank 1": efficient(folder, 1), "worker": workers(2)}  # fmt: skip
    found.update(zero3(folder, json.loads(Path(config).read_text())))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
