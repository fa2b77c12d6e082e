"""Pre-train the decoder with FSDP2: one unit per block and the root, bfloat16 compute, float32 reduction."""

import torch
import torch.distributed as dist
from model import build
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(batch_size: int = 8, length: int = 2048) -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(100):
        tokens = torch.randint(50304, (batch_size, length + 1), device=device)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
