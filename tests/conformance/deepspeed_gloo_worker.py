"""One rank of a real run of the unmodified DeepSpeed engine: real tensors on the CPU, real gloo collectives between processes.

    python deepspeed_gloo_worker.py CASES.json OUT.pickle RANK WORLD STORE

Writes what the rank holds after each case's last step. The native optimizer kernels, which update in place, are left out as in
deepspeed_worker.py; optimizer classes, reductions, gathers and partitions are the real ones.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import deepspeed_worker

SETTLE_SECONDS = 0.3


class RealBooks(deepspeed_worker.Books):
    """Values are real: nothing is answered for the ops, storages are only counted."""

    def mode(self) -> Any:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        books = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for t in tree_leaves(out):
                    if isinstance(t, torch.Tensor):
                        books.see(t)
                return out

        return Mode()

    def report(self) -> list[dict[str, Any]]:
        """gloo's threads hold the last collective's tensors until they come to drop them, on a loaded machine later than the step."""
        import torch.distributed as dist

        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        return super().report()


def start(rank: int, world: int, store: str) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # fmt: skip
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300))
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # shared memory beside gloo, to be compiled
    deepspeed_worker._stub_native_ops()
    deepspeed_worker.DEVICE = "cpu"
    deepspeed.init_distributed("gloo")


def main(cases_file: str, out_file: str, rank: str, world: str, store: str) -> None:
    with open(cases_file) as f:
        cases = [{**deepspeed_worker.CASE, **c} for c in json.load(f)]
    start(int(rank), int(world), store)
    held = []
    for case in cases:
        with deepspeed_worker._silent():
            rows = deepspeed_worker.run_engine(case, nullcontext(), RealBooks())
        held.append(rows[-1]["host_end"])
    with open(out_file, "wb") as out:
        pickle.dump(held, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # gloo's threads outlive the interpreter's modules
