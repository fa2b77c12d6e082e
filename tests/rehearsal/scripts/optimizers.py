"""Every optimizer of launchguard's table, built as the stand-in builds it, two steps each."""

import torch

from launchguard.profiles import optimizers
from launchguard.rehearsal.inside.synthetic_job import optimizer_of
from launchguard.rehearsal.stand_in import described_optimizer


def train(profile):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 512), torch.nn.Linear(512, 512), torch.nn.LayerNorm(512)).cuda()
    described = described_optimizer(profile.name, profile.default_implementation)
    optimizer = optimizer_of({"loop": "torch", "optimizer": described}, model)
    for _ in range(2):
        getattr(optimizer, "train", lambda: None)()  # schedulefree wants to be told
        loss = model(torch.zeros(2, 8, dtype=torch.long, device="cuda")).sum()
        if hasattr(optimizer, "fused_backward"):  # LOMO steps inside
            optimizer.fused_backward(loss, 1e-4)
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return type(optimizer)


made = {}
for profile in optimizers():
    try:
        made[profile.name] = train(profile).__module__
    except ImportError as e:
        print(f"{profile.name}: not here: {str(e).splitlines()[0]}")
    except ValueError as e:  # torch.optim.Muon refuses vectors; transformers says so of some packages
        assert profile.name == "muon" or "nstall" in str(e), f"{profile.name}: {e}"
print(made)
assert {"adamw": "torch.optim.adamw", "adafactor": "transformers.optimization", "lamb": "deepspeed.ops.lamb.fused_lamb",
        "paged_adamw_8bit": "bitsandbytes.optim.adamw", "lion_8bit": "bitsandbytes.optim.lion"}.items() <= made.items()  # fmt: skip
assert len(made) >= 27
