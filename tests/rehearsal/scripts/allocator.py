"""A random trace through torch's own allocator and launchguard's, step by step: allocated, reserved, retries, refusals."""

import os
import random

import torch

from launchguard.allocator import make_allocator, parse_conf

torch.zeros(1, device="cuda")
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
ours = make_allocator(parse_conf(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")), free, total)
streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
choose, live, refused = random.Random(0), [], 0
sizes = (1, 600, 40_000, 1 << 20, (1 << 20) + 1, 3_000_000, 9 << 20, 11_000_000, 33_000_000, 150_000_000, 400_000_000)


def real() -> list[int]:
    stats = torch.cuda.memory_stats()
    return [stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"], stats["num_alloc_retries"]]


base = real()  # nothing but what was there: zeros
for step in range(600):
    what = choose.random()
    if what < 0.55:
        nbytes, stream = choose.choice(sizes) + 512 * choose.randrange(2000), choose.randrange(3)
        block = ours.malloc(nbytes, stream)
        try:
            pointer = torch.cuda.caching_allocator_alloc(nbytes, 0, streams[stream])
        except torch.cuda.OutOfMemoryError:
            pointer = None
        assert (block is None) == (pointer is None), (step, nbytes)
        refused += block is None
        live += [] if block is None else [(block, pointer)]
    elif what < 0.98 and live:
        block, pointer = live.pop(choose.randrange(len(live)))
        ours.free(block)
        torch.cuda.caching_allocator_delete(pointer)
    elif what >= 0.98:
        ours.empty_cache()
        torch.cuda.empty_cache()
    found, expected = [ours.allocated, ours.reserved, ours.retries], [a - b for a, b in zip(real(), base)]
    assert found == expected, (step, found, expected)
assert step == 599 and ours.retries > 0 and refused > 0, (step, ours.retries, refused)
