"""Small modules for test_accelerate_loop.py, which the tracer builds by "accelerate_models:NAME". Linear layers and GELU only: for them the
autocast lists of CPU and CUDA agree (torch 2.13 aten/src/ATen/autocast_mode.h), and no kernel needs scratch."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 48


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 200, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(layer(x)) + x


class Repeated(Plain):
    """Every weight is used twice: its cast is made once, and kept by the autocast cache."""

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().run(layer, super().run(layer, x))


class Checkpointed(Plain):
    """The cache keeps the casts of checkpointed layers to the end of forward; backward makes them again."""

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().run, layer, x, use_reentrant=False)


class Frozen(Plain):
    """Weights that need no gradient are not cached."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.layers[1].requires_grad_(True)
