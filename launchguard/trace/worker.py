"""The process that traces: everything that imports torch or changes it for good happens here, and dies with it."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from launchguard.errors import InputError, LaunchguardError, Unpredictable
from launchguard.installed import release
from launchguard.job import FsdpSpec
from launchguard.trace.cache import encode
from launchguard.trace.request import TraceRequest


def main(requests: list[TraceRequest], pipe: Connection) -> None:
    """Send ("progress", text)* and then ("trace", bytes) for each request, or ("error", (kind, message, where, help)); never returns."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    _silence()
    try:
        for request in requests:
            trace = run(request, lambda text: pipe.send(("progress", text)))
            pipe.send(("trace", encode(trace)))
    except LaunchguardError as e:
        pipe.send(("error", ("input" if isinstance(e, InputError) else "unknown", e.message, e.where, e.help)))
    except ModuleNotFoundError as e:
        name = (e.name or "a library").split(".")[0]
        pipe.send(("error", ("unknown", f"{name} is not installed here", "", f"pip install {name} (a CPU build is enough)")))
    except BaseException as e:  # anything else is a job that cannot be traced: say where it stopped
        message, remedy = f"{type(e).__name__}: {_first_line(e)}", "run with --model module:callable, or report the model"
        pipe.send(("error", ("unknown", message, _user_line(e), remedy)))
    pipe.close()
    os._exit(0)  # a Python PrivateUse1 backend aborts at interpreter exit


def _silence() -> None:
    """stdout and stderr are the parent's: nothing that a library prints may reach them."""
    if not os.environ.get("LAUNCHGUARD_DEBUG"):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.dup2(null, 1)


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [""])[0][:300]


def _user_line(e: BaseException) -> str:
    """The innermost frame outside torch and launchguard: the model's own line."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename and "/launchguard/" not in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def run(request: TraceRequest, progress: Callable[[str], None]) -> Any:
    """Trace one request in this process. Imports torch; installs the simulated device for the rest of the process's life."""
    started = time.perf_counter()
    progress("loading torch")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from launchguard.trace import build_model
    from launchguard.trace.cuda_semantics import Card
    from launchguard.trace.zero3_linear import zero3_linear

    major, minor, sms, threads = request.card
    card = Card((major, minor), sms, threads, release(request.versions.get("torch", torch.__version__)))
    progress("building the model")
    model = build_model.build(request, card)
    semantics = _installed(card)
    semantics.kernels.clear()
    if request.fused_lm_head:
        _fuse_lm_head(model)
    _fix_libraries()
    if request.config is not None:
        import transformers

        from launchguard.trace import older_transformers

        stated = request.versions.get("transformers", transformers.__version__)
        sdpa = request.factory is None and request.attn_implementation in (None, "sdpa")
        older_transformers.imitate(stated, transformers.__version__, sdpa)
    if request.evaluation is not None:
        model.eval()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        build_model.place(model, request.compute, cast_trained=not request.adapters_stay)
    built = time.perf_counter()
    facts = _facts(model, request)
    if request.flat is not None:
        _under_fsdp1(model, facts, **request.flat)
    if request.first is not None:
        cast_adapter_inputs(request.first)
    step = _step(request, semantics)
    make_batch = build_model.batch_maker(model, request)
    with zero3_linear(request.zero3_linear):
        trace = _run(request, mode, model, make_batch, step, card, progress, facts)
    facts["attention_kernels"] = sorted(semantics.kernels)
    facts["seconds"] = {"build": round(built - started, 3), "trace": round(time.perf_counter() - built, 3)}
    facts["torch"] = torch.__version__
    facts["kind"] = "evaluation" if request.evaluation is not None else "first" if request.first is not None else "step"
    return trace


def _run(request: TraceRequest, mode: Any, model: Any, make_batch: Any, step: Any, card: Any, progress: Any, facts: Any) -> Any:
    from launchguard.trace import capture

    if request.evaluation is not None:
        ignored = list(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or ())
        return capture.capture_evaluation(mode, model, make_batch, step, card, progress, facts, ignored)
    return capture.capture(mode, model, make_batch, step, card, progress, facts, request.outputs_alive)


@functools.cache
def _installed(card: Any) -> Any:
    """The simulated device, once per process."""
    from launchguard.trace.cuda_semantics import Semantics

    semantics = Semantics(card)
    semantics.install()
    return semantics


def _under_fsdp1(model: Any, facts: dict[str, Any], peft: bool, storage: str, **fsdp: Any) -> None:
    """What FSDP1 changes for a model with adapters. Adapters in units of their own are resharded when PEFT looks at their dtype, and so
    their inputs are cast to that of the shards (peft 0.21 tuners/tuners_utils.py:_cast_input_dtype)."""
    from launchguard.trace import build_model

    build_model.share_flat_parameters(model, facts, FsdpSpec(**fsdp), peft)
    if peft:
        cast_adapter_inputs(storage)


def cast_adapter_inputs(dtype: str) -> None:
    """For the rest of the process, adapters see their weights in this dtype when they cast their inputs."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    cast = getattr(BaseTunerLayer._cast_input_dtype, "original", BaseTunerLayer._cast_input_dtype)
    seen = getattr(torch, dtype)

    def cast_input(layer: Any, x: Any, _: Any) -> Any:
        return cast(layer, x, seen)

    cast_input.original = cast  # type: ignore[attr-defined]
    BaseTunerLayer._cast_input_dtype = cast_input


def _facts(model: Any, request: TraceRequest) -> dict[str, Any]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding, output = _embedding(base, "get_input_embeddings"), _embedding(base, "get_output_embeddings")
    names = {id(m): n for n, m in model.named_modules()}
    return {
        "no_split_modules": sorted(getattr(base, "_no_split_modules", None) or []),
        "input_embedding": names.get(id(embedding)),
        "output_embedding": names.get(id(output)),
        "tied": bool(embedding is not None and output is not None and getattr(output, "weight", None) is getattr(embedding, "weight", 0)),
        "model_class": type(base).__name__,
        "base_model_prefix": getattr(model, "base_model_prefix", ""),
    }


def _embedding(model: Any, getter: str) -> Any:
    """The module that a Hugging Face getter names; models without one raise NotImplementedError."""
    try:
        return getattr(model, getter, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None


def _fix_libraries() -> None:
    """transformers takes its export path for fake tensors and keeps a 4-D mask; a full attention mask really is skipped
    (transformers 5.24 masking_utils: is_tracing, fast_all, find_packed_sequence_indices)."""
    import sys

    masking = sys.modules.get("transformers.masking_utils")
    if masking is not None:
        masking.is_tracing = lambda tensor=None: False  # type: ignore[attr-defined]
        masking.fast_all = lambda tensor: True  # type: ignore[attr-defined]
        masking.find_packed_sequence_indices = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _step(request: TraceRequest, semantics: Any) -> Callable[..., Any]:
    """Forward and loss as the job's loop runs them."""
    import torch

    dtype = None if request.autocast is None else getattr(torch, request.autocast)
    prepared = False

    def step(model: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal prepared
        if request.float32_outputs and not prepared:
            prepared = True
            _prepare_forward(model, semantics, dtype)
        with semantics.autocast(None if request.float32_outputs else dtype):
            outputs = _call(model, {**batch, "fused_lm_head": True} if request.fused_lm_head else batch)
            if request.fused_lm_head and request.evaluation == "predictions":
                return _sft_loss(outputs), _call(model, {k: v for k, v in batch.items() if k != "labels"})  # the logits: forward again
            batch.clear()  # whoever keeps a batch longer is a matter of the loop
            if request.config is None:
                return _loss(outputs, request.loss), outputs
        if request.fused_lm_head:
            return _sft_loss(outputs), outputs
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs

    return step


def _call(model: Any, batch: dict[str, Any]) -> Any:
    """Inputs by name; in the order of their description when forward does not know the names (nn.Sequential, nn.Linear)."""
    import inspect

    known = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if takes_any or set(batch) <= set(known):
        return model(**batch)
    return model(*batch.values())


def _fuse_lm_head(model: Any) -> None:
    """TRL's own fused head. Its tiles are folded by Triton kernels on CUDA, which allocate nothing; the torch fallback would, and its
    float32 accumulation is one addmm there (trl 1.16 kernels/chunked_logprob.py)."""
    from trl.kernels import chunked_logprob
    from trl.trainer.utils import add_fused_lm_head

    chunked_logprob._forward_tile = chunked_logprob._backward_tile = lambda *args, **kwargs: None
    chunked_logprob._addmm_fp32 = lambda acc, a, b: None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))


def _sft_loss(outputs: Any) -> Any:
    """trl 1.16 SFTTrainer.compute_loss, loss_type nll."""
    return -outputs.log_probs.sum() / outputs.label_mask.sum().clamp(min=1)


def _prepare_forward(model: Any, semantics: Any, dtype: Any) -> None:
    """accelerate 1.15 accelerator.py:prepare_model: model.forward becomes convert_outputs_to_fp32(autocast(forward))."""
    forward = model.forward

    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with semantics.autocast(dtype):
            outputs = forward(*args, **kwargs)
        return _to_float32(outputs)

    model.forward = autocast_forward


def _loss(outputs: Any, how: str | None) -> Any:
    if how in (None, "sum"):
        tensor = outputs if not isinstance(outputs, (tuple, list)) else outputs[0]
        return tensor.float().sum() if tensor.dim() else tensor
    value = outputs
    for part in [p for p in (how or "").split(".") if p != "output"]:
        value = value[int(part)] if part.isdigit() else value[part] if isinstance(value, dict) else getattr(value, part)
    if getattr(value, "dim", lambda: 1)():
        raise Unpredictable(f"model.loss = {how!r} is not a scalar (shape {tuple(value.shape)})", where="launchguard.yaml:model.loss",
                            help="name a scalar of the output, or use 'sum'")  # fmt: skip
    return value


def _to_float32(outputs: Any) -> Any:
    """accelerate 1.15 utils/operations.py: ConvertOutputsToFp32 over the whole output structure."""
    import torch
    from torch.utils._pytree import tree_map

    def convert(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float32 else x

    if isinstance(outputs, dict):
        return type(outputs)({k: tree_map(convert, v) for k, v in outputs.items()})
    return tree_map(convert, outputs)
