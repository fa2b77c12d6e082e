"""Models that measured cases describe beyond a config.json: losses that never hold full logits, selective and offloaded checkpointing,
tensor-parallel ranks, convolutional networks, toy modules. Imported by launchguard's trace worker as "factories:<name>" (module:callable),
built on the meta device. Nothing here knows a case."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORED_LABEL = -100


class FrozenLinear(nn.Linear):
    """A Linear by another class name, so that wrap policies can tell adapters (nn.Linear) from the layers under them."""


def causal_lm(
    config: dict[str, Any], load: str = "float32", attention: str | None = None, loss: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None, liger: bool = False, tiled: bool = False, tp: int = 1, rename_linears: bool = False,
) -> nn.Module:  # fmt: skip
    """A Hugging Face decoder. loss: {"kind": ..., "chunk": n} (see LOSSES); checkpoint: {"kind": "selective_ops" | "every_second" |
    "offload"}; tp: this rank's share of a tensor-parallel model with sequence parallelism."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    raw = {k: v for k, v in config.items() if k not in ("architectures", "transformers_version", "dtype", "torch_dtype")}
    built = AutoConfig.for_model(**(_rank_local(raw, tp) if tp > 1 else raw))
    built.use_cache = False
    cls: Any = AutoModelForCausalLM._model_mapping[type(built)]
    if attention == "sdpa":
        family = next(c for c in cls.__mro__ if c.__name__.endswith("PreTrainedModel"))
        family._supports_sdpa = True  # stands for flash-attn and kernels that a class may have without having SDPA
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            built, dtype=getattr(torch, load), **({"attn_implementation": attention} if attention else {})
        )
    model.tie_weights()
    if rename_linears:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FrozenLinear
    if tp > 1:
        _sequence_parallel(model, tp)
    if liger:
        liger_layers(model)
    if tiled:
        tiled_mlp(model)
    if checkpoint is not None:
        CHECKPOINTS[checkpoint["kind"]](model)
    if loss is not None:
        model.forward = _with_loss(model, LOSSES[loss["kind"]], loss.get("chunk") or 0)
    return model


def squared_states(config: dict[str, Any]) -> nn.Module:
    """A Hugging Face model without a head whose loss is the mean square of its last hidden states (torch-preflight's T4 runs)."""
    from transformers import AutoConfig, AutoModel

    model: Any = AutoModel.from_config(AutoConfig.for_model(**config))
    own = model.forward

    def forward(input_ids: torch.Tensor) -> dict[str, Any]:
        outputs = own(input_ids=input_ids)
        return {"loss": outputs.last_hidden_state.pow(2).mean(), **outputs}

    model.forward = forward
    return model


def _with_loss(model: Any, loss: Callable[..., torch.Tensor], chunk: int) -> Callable[..., dict[str, torch.Tensor]]:
    """A forward that hands hidden states and head to a loss of its own, without full logits in between."""

    def forward(
        input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return {"loss": loss(hidden, model.get_output_embeddings(), labels, chunk)}

    return forward


# ------------------------------------------------------------------------------------------------ losses
def chunked_head(hidden: torch.Tensor, head: Callable[..., torch.Tensor], labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """litgpt: head and cross entropy on `chunk` positions at a time, in the compute dtype; every chunk's log-softmax is kept."""
    logits = [head(part) for part in hidden[:, :-1].split(chunk, dim=1)]
    losses = [F.cross_entropy(part.reshape(-1, part.shape[-1]), target.reshape(-1), ignore_index=IGNORED_LABEL, reduction="none")
              for part, target in zip(logits, labels[:, 1:].split(chunk, dim=1))]  # fmt: skip
    return torch.cat(losses).sum() / labels.numel()


def chunked_cross_entropy(hidden: torch.Tensor, head: Callable[..., torch.Tensor], labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """litgpt: full logits in the compute dtype, cross entropy on `chunk` rows at a time."""
    logits = head(hidden)[:, :-1]
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    losses = [F.cross_entropy(r, t, ignore_index=IGNORED_LABEL, reduction="none") for r, t in zip(rows.split(chunk), targets.split(chunk))]
    return torch.cat(losses).sum() / labels.numel()


def output_chunks(hidden: torch.Tensor, head: Callable[..., torch.Tensor], labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """torchtune, torchtitan: the head gives `chunk` pieces, each is upcast to float32 for its own cross entropy."""
    pieces, targets = [head(part) for part in hidden.chunk(chunk, dim=1)], labels.chunk(chunk, dim=1)
    total: Any = 0.0
    for piece, target in zip(pieces, targets):
        total = total + F.cross_entropy(piece.reshape(-1, piece.shape[-1]).float(), target.reshape(-1), reduction="sum")
    return total / labels.numel()


class _VocabularyChunks(torch.autograd.Function):
    """prime-rl's log-probabilities and entropy: the logits of `chunk` words at a time, made again in backward; nothing of tokens x
    vocabulary is kept. The head's gradient is made whether or not it trains."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:
        running = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in weight.split(chunk):
            logits = hidden @ part.t()
            scores = logits.float()
            weights = torch.exp(scores - running[:, None])
            running = running + weights.sum(-1) + (weights * scores).sum(-1)
        ctx.save_for_backward(hidden, weight, running)
        ctx.chunk = chunk
        return running

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight, running = ctx.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for part, d_part in zip(weight.split(ctx.chunk), d_weight.split(ctx.chunk)):
            logits = hidden @ part.t()
            scores = logits.float()
            probabilities = torch.exp(scores - running[:, None])
            d_logits = grad[:, None] * probabilities
            d_hidden += d_logits.to(hidden.dtype) @ part
            d_part += d_logits.to(weight.dtype).t() @ hidden
        return d_hidden, d_weight if ctx.needs_input_grad[1] else None, None


def vocabulary_chunks(hidden: torch.Tensor, head: Any, labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """Policy losses whose head is applied to part of the vocabulary at a time."""
    return _VocabularyChunks.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight, chunk).mean()


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Liger (liger_kernel 0.6 ops/fused_linear_cross_entropy.py): gradients are made in forward, chunk by chunk, so that one chunk of
    logits is alive; the number of rows in a chunk keeps its logits about as large as the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, width = hidden.shape
        pieces = -(-weight.shape[0] // width)
        chunk = 1 << (-(-rows // pieces) - 1).bit_length()
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        for start in range(0, rows, chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t()  # the kernel writes the gradient over it
            d_hidden[start : start + chunk] = logits @ weight
            if d_weight is not None:
                d_weight += torch.mm(logits.t(), part)
        ctx.save_for_backward(d_hidden, d_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors


def fused_linear(hidden: torch.Tensor, head: Any, labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """Liger's fused linear cross entropy over shifted hidden states."""
    weight = head.weight.to(torch.get_autocast_dtype(hidden.device.type)) if torch.is_autocast_enabled(hidden.device.type) else head.weight
    return _FusedLinearCrossEntropy.apply(hidden[:, :-1].reshape(-1, hidden.shape[-1]).to(weight.dtype), weight)


class _CutCrossEntropy(torch.autograd.Function):
    """Cut cross entropy: logits exist in on-chip blocks only; the log-sum-exp of every row is kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        lse = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        ctx.save_for_backward(hidden, weight, lse)
        return lse.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        return torch.zeros_like(hidden), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None


def cut(hidden: torch.Tensor, head: Any, labels: torch.Tensor, chunk: int) -> torch.Tensor:
    return _CutCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight.to(hidden.dtype))


def compute_dtype(hidden: torch.Tensor, head: Callable[..., torch.Tensor], labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """Cross entropy on full logits in the dtype that the head gives (no copy in float32)."""
    logits = head(hidden)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class _InPlaceCrossEntropy(torch.autograd.Function):
    """A triton cross entropy that reads logits as they are and writes their gradient over them (unsloth, foak, Liger's plain one)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        lse = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, lse)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def triton(hidden: torch.Tensor, head: Callable[..., torch.Tensor], labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """Such a kernel behind a transformers model, which upcasts logits and copies the shifted part before it calls the loss."""
    logits = head(hidden).float()
    shifted = logits[:, :-1].contiguous()
    return _InPlaceCrossEntropy.apply(shifted.view(-1, logits.shape[-1]))


class _FlashCrossEntropy(_InPlaceCrossEntropy):
    """flash-attn's, whose inplace_backward is off unless asked for (flash_attn/losses/cross_entropy.py)."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def flash(hidden: torch.Tensor, head: Callable[..., torch.Tensor], labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """On all logits in the dtype that the head gives; labels are rolled instead (llmfoundry/models/mpt/modeling_mpt.py)."""
    logits = head(hidden)
    return _FlashCrossEntropy.apply(logits.view(-1, logits.shape[-1]))


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    f.__name__: f
    for f in (chunked_head, chunked_cross_entropy, output_chunks, vocabulary_chunks, fused_linear, cut, compute_dtype, triton, flash)
}


# ------------------------------------------------------------------------------------------------ checkpointing
def _decoder_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) of the model's repeated layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [(parent, name, child) for parent in list(model.modules()) for name, child in parent.named_children()
            if type(child).__name__ in names]  # fmt: skip


def selective_ops(model: nn.Module) -> None:
    """torchtitan's selective checkpointing per op: outputs of products and attention are kept, every second matrix product is not
    (torchtitan models/llama3/infra/parallelize.py)."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    saved = {aten.mm.default, aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention.default,
             aten._scaled_dot_product_cudnn_attention.default, aten.max.default}  # fmt: skip

    def contexts() -> Any:
        count = {True: 0, False: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            count[ctx.is_recompute] += op is aten.mm.default
            keep = op in saved and not (op is aten.mm.default and count[ctx.is_recompute] % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for _, _, layer in _decoder_layers(model):
        layer.forward = _checkpointed(
            layer.forward, lambda run, *a, **k: checkpoint(run, *a, use_reentrant=False, context_fn=contexts, **k)
        )


def every_second(model: nn.Module) -> None:
    """Full checkpointing of every second layer."""
    from torch.utils.checkpoint import checkpoint

    for i, (_, _, layer) in enumerate(_decoder_layers(model)):
        if i % 2 == 0:
            layer.forward = _checkpointed(layer.forward, lambda run, *a, **k: checkpoint(run, *a, use_reentrant=False, **k))


class _Offloaded(torch.autograd.Function):
    """A checkpointed layer whose input waits on the host (unsloth's and TRL's offloaded gradient checkpointing)."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.device = run, hidden.device
        ctx.saved = hidden.to("cpu")
        with torch.no_grad():
            out = run(hidden)
        return out[0] if isinstance(out, tuple) else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden = ctx.saved.to(ctx.device).detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(hidden)
        torch.autograd.backward(out[0] if isinstance(out, tuple) else out, grad)
        return None, hidden.grad


def offload(model: nn.Module) -> None:
    """Full checkpointing with the saved layer inputs on the host."""
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    for _, _, layer in _decoder_layers(model):
        layer.forward = _checkpointed(layer.forward, lambda run, hidden, *a, **k: _Offloaded.apply(lambda x: run(x, *a, **k), hidden))


def _checkpointed(run: Callable[..., Any], checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(run, *args, **kwargs)


CHECKPOINTS: dict[str, Callable[[nn.Module], None]] = {"selective_ops": selective_ops, "every_second": every_second, "offload": offload}


# ------------------------------------------------------------------------------------------------ fused layers
class _LigerNorm(torch.autograd.Function):
    """Liger's RMSNorm: keeps its input and one statistic a row, writes the gradient over the incoming one (ops/rms_norm.py)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        ctx.weight = weight
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.empty_like(ctx.weight) if ctx.needs_input_grad[1] else None


class _LigerSwiGLU(torch.autograd.Function):
    """silu(gate) * up in one kernel; its gradients are written over gate and up (ops/swiglu.py)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors


def liger_layers(model: nn.Module) -> None:
    """Liger's RMSNorm and SwiGLU in the places of the model's own (its rotary embedding works in place and is left as it is)."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = (lambda m: lambda x: _LigerNorm.apply(x, m.weight))(module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            module.forward = (lambda m: lambda x: m.down_proj(_LigerSwiGLU.apply(m.gate_proj(x), m.up_proj(x))))(module)


class _Tiled(torch.autograd.Function):
    """A feed-forward over one tile of the sequence at a time, made again in backward (arctic_training's TiledMLP). All tiles ask for the
    same bytes, so that a few are run and stand for the others."""

    RUN = 3

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], tiles: int, x: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.tiles = run, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            parts = x.chunk(tiles, dim=1)
            return torch.cat([run(part) if i < _Tiled.RUN else torch.empty_like(part) for i, part in enumerate(parts)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach()
        d_x = torch.zeros_like(x)
        for tile, out_grad in list(zip(x.chunk(ctx.tiles, dim=1), grad.chunk(ctx.tiles, dim=1)))[: _Tiled.RUN]:
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.run(tile)
            torch.autograd.backward(out, out_grad)
        return None, None, d_x


def tiled_mlp(model: nn.Module) -> None:
    """As many tiles as the sequence is longer than the hidden size."""
    for _, _, layer in _decoder_layers(model):
        layer.mlp.forward = (lambda run: lambda x: _Tiled.apply(run, -(-x.shape[1] // x.shape[-1]), x))(layer.mlp.forward)


# ------------------------------------------------------------------------------------------------ tensor parallelism, one rank of it
def _rank_local(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """Heads, feed-forward width and vocabulary of one rank; the hidden size stays whole."""
    heads = config["num_attention_heads"]
    local = {**config, "head_dim": config.get("head_dim") or config["hidden_size"] // heads, "num_attention_heads": heads // tp,
             "num_key_value_heads": max(1, config.get("num_key_value_heads", heads) // tp),
             "intermediate_size": config["intermediate_size"] // tp, "vocab_size": config["vocab_size"] // tp}  # fmt: skip
    return local


class _Gather(torch.autograd.Function):
    """All-gather along the sequence; its gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: int) -> torch.Tensor:
        ctx.tp = tp
        return x.new_empty((x.shape[0], x.shape[1] * tp, *x.shape[2:]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.new_empty((grad.shape[0], grad.shape[1] // ctx.tp, *grad.shape[2:])), None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter along the sequence; its gradient is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: int) -> torch.Tensor:
        ctx.tp = tp
        return x.new_empty((x.shape[0], x.shape[1] // tp, *x.shape[2:]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.new_empty((grad.shape[0], grad.shape[1] * ctx.tp, *grad.shape[2:])), None


def _sequence_parallel(model: Any, tp: int) -> None:
    """Norms and residuals hold 1/tp of the sequence, attention and feed-forward the whole of it (torchtitan's Llama plan)."""
    layers = [layer for _, _, layer in _decoder_layers(model)]
    layers[0].register_forward_pre_hook(
        lambda m, args, kwargs: ((_Scatter.apply(args[0], tp), *args[1:]), kwargs), with_kwargs=True
    )  # fmt: skip
    for layer in layers:
        for part in (layer.self_attn, layer.mlp):
            part.forward = _gathered(part.forward, tp)
    head = model.get_output_embeddings()
    head.forward = (lambda run: lambda x: run(_Gather.apply(x, tp)))(head.forward)


def _gathered(run: Callable[..., Any], tp: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_Gather.apply(args[0], tp), *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": _Gather.apply(kwargs["hidden_states"], tp)}
        out = run(*args, **kwargs)
        return (_Scatter.apply(out[0], tp), *out[1:]) if isinstance(out, tuple) else _Scatter.apply(out, tp)

    return forward


class _Reduced(torch.autograd.Function):
    """Megatron's f: the same tensor in forward, its gradient is all-reduced in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class MegatronLayer(nn.Module):
    """One rank's part of a Megatron GPT layer: column-parallel QKV and first feed-forward product, row-parallel second ones."""

    def __init__(self, hidden: int, heads: int, tp: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size, self.dropout = heads // tp, hidden // heads, dropout
        self.input_norm, self.post_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.dense = nn.Linear(hidden, 3 * hidden // tp), nn.Linear(hidden // tp, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden // tp), nn.Linear(4 * hidden // tp, hidden)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Unfused attention with Megatron's scaled masked softmax (one kernel, in place of scores)."""
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, self.heads, 3 * self.size).transpose(1, 2).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-1, -2))
        kept = F.dropout(torch.softmax(scores, dim=-1), self.dropout)
        return self.dense(torch.matmul(kept, v).transpose(1, 2).reshape(b, s, self.heads * self.size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attend(_Reduced.apply(self.input_norm(x))), self.dropout)
        inner = F.gelu(self.up(_Reduced.apply(self.post_norm(x))), approximate="tanh")
        return x + F.dropout(self.down(inner), self.dropout)


class MegatronGPT(nn.Module):
    """One tensor-parallel rank of a GPT with tied, vocabulary-parallel embeddings."""

    _no_split_modules = ("MegatronLayer",)

    def __init__(self, hidden: int, layers: int, heads: int, vocab: int, positions: int, tp: int, dropout: float, checkpoint: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab // tp, hidden)
        self.position = nn.Embedding(positions, hidden) if positions else None
        self.layers = nn.ModuleList([MegatronLayer(hidden, heads, tp, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.checkpoint, self.dropout = checkpoint, dropout

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        from torch.utils.checkpoint import checkpoint

        x = self.embedding(input_ids)
        if self.position is not None:
            x = x + self.position.weight[: input_ids.shape[1]]
        x = F.dropout(x, self.dropout)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return {"loss": F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))}


def megatron_gpt(config: dict[str, Any], seq: int, tp: int, checkpoint: str = "none", load: str = "float32") -> nn.Module:
    """From a GPT-2 or BLOOM config (BLOOM: no position embeddings). checkpoint: "none", "every" layer, or a key of CHECKPOINTS."""
    hidden, positions = config.get("n_embd") or config["hidden_size"], seq if "n_positions" in config else 0
    layers, heads = config["n_layer"], config["n_head"]
    dropout = config.get("resid_pdrop", 0.0)
    model = MegatronGPT(hidden, layers, heads, config["vocab_size"], positions, tp, dropout, checkpoint == "every")
    if checkpoint in CHECKPOINTS:
        CHECKPOINTS[checkpoint](model)
    return model.to(getattr(torch, load))


# ------------------------------------------------------------------------------------------------ small and convolutional models
class Classifier(nn.Module):
    """An image model with cross entropy over its classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.model(pixel_values)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return {"loss": F.cross_entropy(logits, labels)}


def torchvision_model(name: str) -> nn.Module:
    """torchvision's own model where it is installed, else an equal one: VGG-16 from its table, ResNet-50 and EfficientNet-B0 from
    transformers. ValueError for any other."""
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError:
        return Classifier(_without_torchvision(name))
    kwargs = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    return Classifier(getattr(models, name)(**kwargs))


def _without_torchvision(name: str) -> nn.Module:
    if name == "vgg16":
        return vgg16()
    from transformers import AutoModelForImageClassification, EfficientNetConfig, ResNetConfig

    if name == "efficientnet_b0":
        config: Any = EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280, dropout_rate=0.2, num_labels=1000
        )
    elif name == "resnet50":
        config = ResNetConfig(num_labels=1000)
    else:
        raise ValueError(f"no torchvision here, and no equal of {name}")
    return AutoModelForImageClassification.from_config(config)


def vgg16(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(4096, classes)]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((7, 7)), nn.Flatten(), *head)


class DemoTransformer(nn.Module):
    """lightning.pytorch.demos.Transformer: nn.Transformer over tokens, log-softmax, negative log-likelihood."""

    def __init__(self, d_model: int, ffn: int, layers: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.transformer = nn.Transformer(d_model, heads, layers, layers, ffn, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(d_model, vocab)
        self.scale = d_model**0.5

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        t = labels.shape[1]
        mask = torch.empty((t, t), dtype=torch.float32, device=labels.device)
        source, target = (F.dropout(self.embedding(x) * self.scale, 0.2) for x in (input_ids, labels))
        output = self.decoder(self.transformer(source, target, tgt_mask=mask))
        return {"loss": F.nll_loss(F.log_softmax(output, dim=-1).view(-1, output.shape[-1]), labels.view(-1))}


class FeedForward(nn.Module):
    """SwiGLU feed-forward, this rank's part of it: w1 and w3 column-parallel, w2 row-parallel."""

    def __init__(self, dim: int, hidden_dim: int, tp: int = 1) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim // tp, bias=False)
        self.w2 = nn.Linear(hidden_dim // tp, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim // tp, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
