"""litgpt's decoder as a module of our own, for measured cases of its fine-tuning scripts: one packed q-k-v product, keys and values spread
over all heads, adapters with one dropout for each adapted product, a head applied to 128 positions at a time. Shapes and the order of
operations were read in Lightning-AI/litgpt (litgpt/model.py, lora.py, utils.py:chunked_cross_entropy at ad57435a, lit_gpt/ at 8641822).
Imported by launchguard's trace worker as "litgpt_model:build", on the meta device. Nothing here knows a case."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORED_LABEL = -100
HEAD_CHUNK = 128  # positions, finetune/lora.py; rows of chunked_cross_entropy
DROPOUT = 0.05  # lora_dropout of finetune/lora.py and of every file in config_hub


@dataclass(frozen=True)
class Shape:
    """What litgpt's Config says, from a Hugging Face config of the same model."""

    width: int
    layers: int
    heads: int
    groups: int
    head: int
    inner: int
    vocabulary: int
    rotary: int
    bias: bool
    mlp: str  # "neox" | "llama" | "gemma"
    approximate: str
    layer_norm: bool
    parallel: bool
    shared_norm: bool
    post_norms: bool
    scaled_embeddings: bool
    scores_cap: float | None
    logits_cap: float | None
    head_bias: bool


def shape_of(config: dict[str, Any]) -> Shape:
    """KeyError for a model type whose litgpt settings are not listed."""
    kind = config["model_type"]
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or width // heads
    rotary = config.get("rotary_pct") or config.get("partial_rotary_factor") or 1.0
    mlp = {"gpt_neox": "neox", "phi": "neox", "falcon": "neox", "gemma": "gemma", "gemma2": "gemma",
           "llama": "llama", "mistral": "llama", "phi3": "llama", "stablelm": "llama"}[kind]  # fmt: skip
    groups = 1 if config.get("multi_query") else config.get("num_key_value_heads") or heads
    return Shape(
        width=width,
        layers=config["num_hidden_layers"],
        heads=heads,
        groups=groups,
        head=head,
        inner=config.get("intermediate_size") or 4 * width,
        vocabulary=config["vocab_size"],
        rotary=int(rotary * head),
        bias=kind in ("gpt_neox", "phi"),
        mlp=mlp,
        approximate="tanh" if kind in ("phi", "gemma", "gemma2") else "none",
        layer_norm=mlp == "neox",
        parallel=mlp == "neox",
        shared_norm=kind in ("phi", "falcon"),
        post_norms=kind == "gemma2",
        scaled_embeddings=mlp == "gemma",
        scores_cap=config.get("attn_logit_softcapping"),
        logits_cap=config.get("final_logit_softcapping"),
        head_bias=kind == "phi",
    )


@dataclass(frozen=True)
class Adapters:
    """rank 0: none. parts: of "q", "k", "v", "proj", "mlp", "head"; inplace_pad: zeros are filled in place (2024), not copied (2023)."""

    rank: int = 0
    parts: tuple[str, ...] = ()
    inplace_pad: bool = True


class RMSNorm(nn.Module):
    def __init__(self, width: int, upcast: bool, unit: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.upcast, self.unit = upcast, unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        if self.upcast:
            x = x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        weight = 1 + self.weight if self.unit else self.weight
        return (normed * weight.float()).to(given) if self.upcast else weight * normed


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter behind a dropout of its input."""

    def __init__(self, n_in: int, n_out: int, bias: bool, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=bias)
        self.rank = rank
        if rank:
            self.lora_A, self.lora_B = nn.Parameter(torch.empty(rank, n_in)), nn.Parameter(torch.empty(n_out, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if not self.rank:
            return y
        return y + (F.dropout(x, DROPOUT, self.training) @ self.lora_A.t() @ self.lora_B.t()) * 1.0


class AdaptedQKV(nn.Module):
    """The packed product with adapters on some of q, k and v: a grouped product, then zeros for the others."""

    def __init__(self, shape: Shape, adapters: Adapters) -> None:
        super().__init__()
        sizes = {"q": shape.heads * shape.head, "k": shape.groups * shape.head, "v": shape.groups * shape.head}
        self.linear = nn.Linear(shape.width, sum(sizes.values()), bias=shape.bias)
        self.adapted = [sizes[part] for part in "qkv" if part in adapters.parts] if adapters.rank else []
        self.equal, self.inplace = shape.heads == shape.groups, adapters.inplace_pad
        if self.adapted:
            rank = adapters.rank
            self.lora_A = nn.Parameter(torch.empty(rank * len(self.adapted), shape.width))
            self.lora_B = nn.Parameter(torch.empty(sum(self.adapted), rank))
            index = [i for part, start in (("q", 0), ("k", sizes["q"]), ("v", sizes["q"] + sizes["k"])) if part in adapters.parts
                     for i in range(start, start + sizes[part])]  # fmt: skip
            self.register_buffer("index", torch.tensor(index, device="cpu").to("meta"), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if not self.adapted:
            return y
        after_a = F.linear(F.dropout(x, DROPOUT, self.training), self.lora_A).transpose(-2, -1)
        weight = self.lora_B.unsqueeze(-1)
        if self.equal:
            after_b = F.conv1d(after_a, weight, groups=len(self.adapted))
        else:
            parts = zip(after_a.chunk(len(self.adapted), dim=1), weight.split(self.adapted))
            after_b = torch.cat([F.conv1d(a, w) for a, w in parts], dim=1)
        return y + self._padded(after_b.transpose(-2, -1)) * 1.0

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        n_out = self.linear.out_features
        if x.shape[-1] == n_out:
            return x
        if self.inplace:
            return x.new_zeros(*x.shape[:-1], n_out).index_copy_(-1, self.index, x)
        rows = x.reshape(-1, x.shape[-1])
        return rows.new_zeros(rows.shape[0], n_out).index_copy(1, self.index, rows).view(*x.shape[:-1], n_out)


class Attention(nn.Module):
    def __init__(self, shape: Shape, adapters: Adapters) -> None:
        super().__init__()
        self.shape = shape
        self.attn = AdaptedQKV(shape, adapters)
        self.proj = AdaptedLinear(shape.heads * shape.head, shape.width, shape.bias, adapters.rank if "proj" in adapters.parts else 0)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        s, (batch, length) = self.shape, x.shape[:2]
        per_group = s.heads // s.groups
        packed = self.attn(x).view(batch, length, s.groups, per_group + 2, s.head).permute(0, 2, 3, 1, 4)
        q, k, v = packed.split((per_group, 1, 1), dim=2)
        if per_group > 1:
            k, v = (t.expand(batch, s.groups, per_group, length, s.head) for t in (k, v))
        q, k, v = (t.reshape(batch, -1, length, s.head) for t in (q, k, v))
        q, k = (torch.cat((_turned(t[..., : s.rotary], cos, sin), t[..., s.rotary :]), dim=-1) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if s.scores_cap is None else self._capped(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, s.heads * s.head))

    def _capped(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * (1 / math.sqrt(self.shape.head))
        scores = torch.tanh(scores / self.shape.scores_cap) * self.shape.scores_cap
        mask = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
        scores = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
        return scores @ v


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc_1 = AdaptedLinear(shape.width, shape.inner, shape.bias, rank)
        if shape.mlp != "neox":
            self.fc_2 = AdaptedLinear(shape.width, shape.inner, shape.bias, rank)
        self.proj = AdaptedLinear(shape.inner, shape.width, shape.bias, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shape.mlp == "neox":
            x = self.fc_1(x)
            x = F.gelu(x, approximate=self.shape.approximate)
            return self.proj(x)
        x, gate = self.fc_1(x), self.fc_2(x)
        x = (F.gelu(x, approximate=self.shape.approximate) if self.shape.mlp == "gemma" else F.silu(x)) * gate
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, shape: Shape, adapters: Adapters, upcast: bool) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1, self.attn = _norm(shape, upcast), Attention(shape, adapters)
        self.norm_2 = None if shape.shared_norm else _norm(shape, upcast)
        self.mlp = Mlp(shape, adapters.rank if "mlp" in adapters.parts else 0)
        self.post_attention = _norm(shape, upcast) if shape.post_norms else nn.Identity()
        self.post_mlp = _norm(shape, upcast) if shape.post_norms else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        attended = self.post_attention(self.attn(normed, cos, sin))
        if self.shape.parallel:
            normed = normed if self.norm_2 is None else self.norm_2(x)
            return self.mlp(normed) + attended + x
        x = attended + x
        return self.post_mlp(self.mlp(self.norm_2(x))) + x  # type: ignore[misc]


def _norm(shape: Shape, upcast: bool) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.layer_norm else RMSNorm(shape.width, upcast, unit=shape.mlp == "gemma")


class Decoder(nn.Module):
    def __init__(self, shape: Shape, adapters: Adapters, upcast: bool, seq: int) -> None:
        super().__init__()
        self.shape, self.adapters = shape, adapters
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(Block(shape, adapters, upcast) for _ in range(shape.layers))
        self.ln_f = _norm(shape, upcast)
        self.lm_head = AdaptedLinear(shape.width, shape.vocabulary, shape.head_bias, adapters.rank if "head" in adapters.parts else 0)
        # made anew in float32 when the longest sample is known (GPT.max_seq_length)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq, shape.rotary, dtype=torch.float32), persistent=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, Any]:
        x = self.wte(input_ids)
        if self.shape.scaled_embeddings:
            x = x * self.shape.width**0.5
        length = input_ids.shape[1]
        for block in self.h:
            x = block(x, self.cos[:length], self.sin[:length])
        x = self.ln_f(x)
        chunked = self.adapters.rank > 0  # finetune/lora.py asks for the head in chunks, full.py does not
        if chunked:
            logits = [self.lm_head(part) for part in x.split(HEAD_CHUNK, dim=1)]
            logits[-1] = logits[-1][..., :-1, :]
            pieces = [part.reshape(-1, part.shape[-1]) for part in logits]
            targets = [part.reshape(-1) for part in labels[:, 1:].split(HEAD_CHUNK, dim=1)]
        else:
            logits = self.lm_head(x)
            if self.shape.logits_cap is not None:
                logits = torch.tanh(logits / self.shape.logits_cap) * self.shape.logits_cap
            rows = logits[:, :-1].reshape(-1, logits.shape[-1])
            pieces, targets = list(rows.split(HEAD_CHUNK)), list(labels[:, 1:].reshape(-1).split(HEAD_CHUNK))
        losses = [F.cross_entropy(p, t, ignore_index=IGNORED_LABEL, reduction="none") for p, t in zip(pieces, targets)]
        return {"loss": torch.cat(losses).sum() / labels.numel(), "logits": logits}


def build(
    config: dict[str, Any], load: str, seq: int, rank: int = 0, parts: tuple[str, ...] = (), upcast_norms: bool = True
) -> nn.Module:  # fmt: skip
    """The decoder of a Hugging Face config with adapters of `rank` on `parts`; everything else is frozen then. upcast_norms: RMSNorm works
    in float32 (litgpt since 2023-10-24, 6178c7cc)."""
    adapters = Adapters(rank, tuple(parts), inplace_pad=upcast_norms)
    model = Decoder(shape_of(config), adapters, upcast_norms, seq).to(getattr(torch, load))
    for name, buffer in list(model.named_buffers(recurse=False)):
        setattr(model, name, buffer.float())
    if rank:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    return model
