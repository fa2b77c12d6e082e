"""DDP with a communication hook: `ddp_hook.py none|bf16|powersgd|own|builtin`."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
card = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(card)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda(), device_ids=[card])


def own(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    half = bucket.buffer().half()
    return dist.all_reduce(half, async_op=True).get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


kind = sys.argv[1]
if kind == "bf16":
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
elif kind == "powersgd":
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
elif kind == "own":
    model.register_comm_hook(None, own)
elif kind == "builtin":
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.zeros(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
