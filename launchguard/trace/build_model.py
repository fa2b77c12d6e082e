"""The job's model, built on meta from its config or factory and moved to fake tensors on the simulated device."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from launchguard.errors import InputError, Unpredictable
from launchguard.events import StepTrace
from launchguard.fsdp_units import units_of
from launchguard.job import FsdpSpec
from launchguard.trace.capture import tables
from launchguard.trace.cuda_semantics import DEVICE, Card
from launchguard.trace.request import TraceRequest

NOT_CONFIG = ("architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
IMAGE_SIZE = 224  # of models whose config leaves it to the image processor
DEFAULT_TASKS = {"vit": "AutoModelForImageClassification", "t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM"}


def build(request: TraceRequest, card: Card) -> torch.nn.Module:
    """The module in train mode on meta, with adapters and checkpointing as the job has them. Raises InputError, Unpredictable."""
    model = _from_factory(request) if request.config is None else _from_config(request)
    if request.quantization is not None:
        from launchguard.trace.quantized import quantize

        quantize(model, request.quantization, request.versions.get("bitsandbytes"))
    checkpoint = request.checkpointing
    if request.lora is not None:
        model = _with_adapters(model, request)
    if request.liger is not None:
        from launchguard.trace import liger

        liger.apply(model.get_base_model() if request.lora is not None else model, request.liger, card)
    if checkpoint is not None and checkpoint["via"] == "model":
        _enable_checkpointing(model, checkpoint)
    if request.input_require_grads and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    if checkpoint is not None and checkpoint["via"] == "fsdp":
        _wrap_checkpoints(model, checkpoint["classes"], checkpoint["use_reentrant"])
    return model.train()


def _enable_checkpointing(model: torch.nn.Module, checkpoint: dict[str, Any]) -> None:
    """The model's own switch; only transformers' new one takes every_n_layers and offload."""
    kwargs = {"use_reentrant": checkpoint["use_reentrant"]}
    partial = {key: checkpoint[key] for key in ("every_n_layers", "offload")}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, **partial)
    elif hasattr(model, "gradient_checkpointing_enable") and partial == {"every_n_layers": 1, "offload": False}:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        raise Unpredictable(f"{type(model).__name__} has no activation_checkpointing_enable, so activation checkpointing cannot be traced",
                            help="call torch.utils.checkpoint inside the module's forward instead, and leave the setting off")  # fmt: skip


# ------------------------------------------------------------------------------------------------ Hugging Face configs
def _from_config(request: TraceRequest) -> torch.nn.Module:
    import transformers

    config = _config_object(request)
    head = _head(transformers, request)
    dtype = getattr(torch, request.load)
    kwargs: dict[str, Any] = {"dtype": dtype}
    if request.attn_implementation:
        kwargs["attn_implementation"] = _traceable_attention(request.attn_implementation)
    with torch.device("meta"), _no_init():
        try:
            model = head.from_config(config, **kwargs) if hasattr(head, "from_config") else head._from_config(config, **kwargs)
        except (ValueError, KeyError, TypeError, AttributeError, ImportError) as e:
            raise InputError(f"{head.__name__} cannot be built from this config: {e}", where="config.json",
                             help="check model_type and sizes, or name another head in launchguard.yaml (model.task)") from e  # fmt: skip
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # skipped together with initialisation
    return model


def _config_object(request: TraceRequest) -> Any:
    from transformers import AutoConfig

    raw = dict(request.config or {})
    if "model_type" not in raw:
        raise InputError("the model's config.json has no model_type", where="config.json", help='add it, e.g. "model_type": "llama"')
    if "auto_map" in raw:
        raise Unpredictable("the model needs code from its repository (auto_map), which launchguard does not run",
                            help="give a factory: --model module:callable")  # fmt: skip
    kwargs = {k: v for k, v in raw.items() if k not in NOT_CONFIG}
    try:
        config = AutoConfig.for_model(**kwargs)
    except (ValueError, TypeError) as e:
        raise InputError(
            f"transformers does not take this config: {e}", where="config.json", help="upgrade transformers or fix the config"
        ) from e
    if request.use_cache is not None:
        config.use_cache = request.use_cache
    return config


def _head(transformers: Any, request: TraceRequest) -> Any:
    config = request.config or {}
    names = [request.task] if request.task else list(config.get("architectures") or [])
    names.append(DEFAULT_TASKS.get(config.get("model_type", ""), "AutoModelForCausalLM"))
    for name in names:
        head = getattr(transformers, name, None)
        if head is not None:
            return head
    raise InputError(
        f"transformers has no class {names[0]!r}", where="config.json:architectures", help="name the head: model.task in launchguard.yaml"
    )


def _traceable_attention(name: str) -> str:
    """flash_attention_2 and _3 allocate what SDPA's flash kernel allocates; their packages need a GPU to import."""
    return "sdpa" if name.startswith(("flash_attention", "kernels-")) else name


@contextlib.contextmanager
def _no_init() -> Iterator[None]:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        yield
        return
    with no_init_weights():
        yield


# ------------------------------------------------------------------------------------------------ module:callable
def _from_factory(request: TraceRequest) -> torch.nn.Module:
    name, _, attribute = (request.factory or "").partition(":")
    sys.path.insert(0, request.python_path)
    try:
        target: Any = importlib.import_module(name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as e:
        raise InputError(f"cannot import {request.factory}: {e}", where="--model", help="run from the folder that holds the module") from e
    try:
        with torch.device("meta"):
            model = target(**request.kwargs)
    except Exception as e:  # the user's own code may raise anything
        raise Unpredictable(f"{request.factory} failed while building on the meta device: {type(e).__name__}: {e}",
                            help="the factory must not read weights or values; build on the default device") from e  # fmt: skip
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{request.factory} returned a {type(model).__name__}, not a torch.nn.Module", where="--model", help="return the module"
        )
    return model.to(getattr(torch, request.load)) if request.load != "float32" else model


# ------------------------------------------------------------------------------------------------ adapters, checkpoints
def _with_adapters(model: torch.nn.Module, request: TraceRequest) -> torch.nn.Module:
    import peft

    lora = dict(request.lora or {})
    autocast = lora.pop("autocast_adapter_dtype")
    lora["modules_to_save"] = lora["modules_to_save"] or None
    target = lora["target_modules"]
    lora["target_modules"] = target if target is None or isinstance(target, str) else list(target)
    if target is None:
        lora.pop("target_modules")
    task = {"ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM", "ForSequenceClassification": "SEQ_CLS"}
    lora["task_type"] = next((t for suffix, t in task.items() if type(model).__name__.endswith(suffix)), None)
    if request.quantization is not None and request.quantization["prepare_kbit"]:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=request.checkpointing is not None)
    try:
        with torch.device("meta"):
            model = peft.get_peft_model(model, peft.LoraConfig(**lora), autocast_adapter_dtype=autocast)
    except ValueError as e:
        raise InputError(f"PEFT does not take these LoRA settings: {e}", where="lora.target_modules",
                         help="name modules that the model has, or 'all-linear'") from e  # fmt: skip
    if not autocast:
        _follow_base_dtype(model)
    if request.quantization is not None and request.quantization["trl_casts"]:
        _cast_as_trl(model)
    return model


def _cast_as_trl(model: torch.nn.Module) -> None:
    """Norms in float32, so that hidden states become float32 behind the first of them; embeddings and heads back in bfloat16
    (TRL 0.7.11 to 0.26.2 trainer/utils.py, later models/utils.py: peft_module_casting_to_bf16)."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")) and getattr(weight, "dtype", None) is torch.float32:
            module.to(torch.bfloat16)


def _follow_base_dtype(model: torch.nn.Module) -> None:
    """Adapters take a floating dtype of their base layer, which PEFT leaves out on the meta device
    (peft 0.21 tuners/tuners_utils.py:_move_adapter_to_device_of_base_layer); with autocast_adapter_dtype all are float32 in the end."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, BaseTunerLayer) else None
        if weight is None or not weight.dtype.is_floating_point:
            continue
        for name in (*layer.adapter_layer_names, *layer.other_param_names):
            adapters = getattr(layer, name, None)
            if isinstance(adapters, (torch.nn.ModuleDict, torch.nn.ParameterDict)):
                for key, adapter in list(adapters.items()):
                    adapters[key] = adapter.to(dtype=weight.dtype)


def _wrap_checkpoints(model: torch.nn.Module, classes: list[str], reentrant: bool) -> None:
    """Accelerate's fsdp2_apply_ac and FSDP1's apply_activation_checkpointing: a wrapper round every wrapped layer."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    names = set(classes) or set(getattr(model, "_no_split_modules", None) or ())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in names:
                setattr(parent, name, checkpoint_wrapper(child, checkpoint_impl=impl, preserve_rng_state=False))


# ------------------------------------------------------------------------------------------------ placing
def place(model: torch.nn.Module, compute: str | None, cast_trained: bool = True) -> None:
    """Replace parameters and buffers by empty ones on the simulated device; floating parameters, or the frozen ones of them, in the compute
    dtype if one is given. Call inside the fake mode. Tied parameters stay tied."""
    memo: dict[int, torch.nn.Parameter] = {}
    cast = None if compute is None else getattr(torch, compute)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is None:
                continue
            if id(p) not in memo:
                memo[id(p)] = _placed(p, None if p.requires_grad and not cast_trained else cast)
            module._parameters[name] = memo[id(p)]
        for name, b in list(module._buffers.items()):
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=DEVICE)
    for holder in list(model.modules()):  # tensors kept outside buffers (rotary frequencies of some models)
        for key, value in list(vars(holder).items()):
            if isinstance(value, torch.Tensor) and value.device.type in ("meta", "cpu") and not isinstance(value, torch.nn.Parameter):
                setattr(holder, key, torch.empty(value.shape, dtype=value.dtype, device=DEVICE))


def _placed(p: torch.nn.Parameter, cast: torch.dtype | None) -> torch.nn.Parameter:
    dtype = cast if cast is not None and p.is_floating_point() else p.dtype
    new = torch.nn.Parameter(torch.empty(p.shape, dtype=dtype, device=DEVICE), requires_grad=p.requires_grad)
    for name in ("launchguard_shape", "launchguard_storage_bytes"):
        if hasattr(p, name):
            setattr(new, name, getattr(p, name))
    return new


def share_flat_parameters(model: torch.nn.Module, facts: dict[str, Any], fsdp: FsdpSpec, peft: bool) -> None:
    """FSDP1 with use_orig_params: a flat parameter requires a gradient when one of its parameters does, and the modules compute with views
    of it. So autograd keeps what the gradients of its frozen parameters need, and makes them (torch 2.13 fsdp/_flat_param.py:
    _validate_tensors_to_flatten, _use_unsharded_views)."""
    modules, params, tensors = tables(model)
    for unit in units_of(StepTrace(params, modules, (), (), facts), fsdp, peft=peft):
        if any(params[i].requires_grad for i in unit.params):
            for p in [tensors[i] for i in unit.params if not params[i].requires_grad and tensors[i].is_floating_point()]:
                p.launchguard_frozen = True
                p.requires_grad_(True)


# ------------------------------------------------------------------------------------------------ inputs
def batch_maker(model: torch.nn.Module, request: TraceRequest) -> Callable[[], dict[str, Any]]:
    """A function that allocates one micro-batch on the simulated device: described inputs, or those of the model's modality and task."""
    if request.inputs:
        shapes = {name: (_shape(t["shape"], request), t["dtype"]) for name, t in request.inputs.items()}
    elif request.config is None:
        raise InputError("the inputs of a module:callable model are not described", where=f"--model {request.factory}",
                         help="add to launchguard.yaml: model: {inputs: {x: {shape: [batch, 1024], dtype: float32}}}")  # fmt: skip
    else:
        shapes = _shapes_of(model, request)
    floats = None if request.compute is None else request.compute

    def make() -> dict[str, Any]:
        out = {}
        for name, (shape, dtype) in shapes.items():
            dtype = floats if floats and dtype == "float32" else dtype
            out[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE)
        return out

    return make


def _shape(shape: Any, request: TraceRequest) -> tuple[int, ...]:
    names = {"batch": request.batch, "seq": request.seq}
    return tuple(names[d] if isinstance(d, str) else int(d) for d in shape)


def _shapes_of(model: torch.nn.Module, request: TraceRequest) -> dict[str, tuple[tuple[int, ...], str]]:
    config = model.config
    head = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    b, s = request.batch, request.seq
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        side = getattr(config, "image_size", IMAGE_SIZE)
        size = side if isinstance(side, (list, tuple)) else (side, side)
        return {"pixel_values": ((b, getattr(config, "num_channels", 3), *size), "float32"), "labels": ((b,), "int64")}
    if main == "input_features":
        frames = (b, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": (frames, "float32"), "labels": ((b, s), "int64")}
    out: dict[str, tuple[tuple[int, ...], str]] = {"input_ids": ((b, s), "int64"), "attention_mask": ((b, s), "int64")}
    per_sequence = head.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    if head.endswith("ForQuestionAnswering"):
        out |= {"start_positions": ((b,), "int64"), "end_positions": ((b,), "int64")}
    else:
        out["labels"] = ((b,) if per_sequence else (b, s), "int64")
    if getattr(config, "is_encoder_decoder", False) and not per_sequence:
        out["decoder_input_ids"] = ((b, s), "int64")  # what the collator makes of the labels
    return out
