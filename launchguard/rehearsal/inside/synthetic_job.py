"""A training script that stands in for the user's: the model and settings of one spec, synthetic batches at full length.

`python synthetic_job.py SPEC.json [arguments of the user's script]`. The spec (JSON):
  loop              trainer | sft | dpo | accelerate | deepspeed | torch
  model             config (of config.json), task (auto class), attn_implementation, use_cache; or factory "module:callable", kwargs, inputs
  dtype             of the parameters as loaded; load_on "cuda" builds them on the card
  micro_batch_size, seq_len, gradient_accumulation_steps, steps, mask (batches carry an attention mask)
  checkpointing     {use_reentrant}, lora {LoraConfig arguments}, quantization {method, double_quant, compute_dtype}
  optimizer         {names, class, implementation, params}: names of the Trainer's list, the class, fused | foreach | for_loop | cpu
  training_arguments  over those parsed from the command line; ds_config: file or dict; accelerator: arguments of Accelerator
  wrap              torch loop: ddp | fsdp1 | fsdp2, with wrap_options; autocast, grad_scaler, max_grad_norm, zero_grad_set_to_none
  eval_rows (size of the evaluation set), save
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

NOT_CONFIG = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
NEVER_QUANTIZED = {"lm_head", "embed_out", "score", "classifier"}
IMPLEMENTATIONS: Mapping[str, Mapping[str, Any]] = {
    "fused": {"fused": True}, "foreach": {"fused": None}, "for_loop": {"fused": None, "foreach": False},
}  # fmt: skip
Spec = Mapping[str, Any]


def _dtype(name: str | None) -> torch.dtype:
    return getattr(torch, name or "float32")


# ---------------------------------------------------------------- the model
def build(spec: Spec) -> torch.nn.Module:
    """The model in train mode, with quantised layers, adapters and checkpointing as the spec has them."""
    model = _from_factory(spec) if spec["model"].get("factory") else _from_config(spec)
    if spec.get("lora"):
        model = _with_adapters(spec, model)
    if spec.get("checkpointing") and hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": spec["checkpointing"].get("use_reentrant", False)}
        )
    return model.train()


def _from_factory(spec: Spec) -> torch.nn.Module:
    module, _, name = spec["model"]["factory"].partition(":")
    sys.path.insert(0, spec["model"].get("python_path", "."))
    return getattr(importlib.import_module(module), name)(**spec["model"].get("kwargs", {}))


def _from_config(spec: Spec) -> torch.nn.Module:
    import transformers

    described = spec["model"]
    config = transformers.AutoConfig.for_model(**{k: v for k, v in described["config"].items() if k not in NOT_CONFIG})
    if described.get("attn_implementation"):
        config._attn_implementation = described["attn_implementation"]
    if described.get("use_cache") is not None:
        config.use_cache = described["use_cache"]
    head = getattr(transformers, described.get("task") or "AutoModelForCausalLM")
    if spec.get("quantization"):
        return _quantized(spec, head, config)
    with torch.device("cuda") if spec.get("load_on") == "cuda" else contextlib.nullcontext():
        return head.from_config(config, dtype=_dtype(spec.get("dtype")))


def _quantized(spec: Spec, head: Any, config: Any) -> torch.nn.Module:
    """bitsandbytes layers in place of the linear ones, quantised on the card weight by weight, as from_pretrained does."""
    import transformers

    dtype, how = _dtype(spec.get("dtype")), spec["quantization"]
    with torch.device("meta"):
        model = head.from_config(config, dtype=dtype)
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear and name not in NEVER_QUANTIZED:
                setattr(parent, name, _quantized_linear(linear, how, dtype))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                module._parameters[name] = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    model.tie_weights()
    four = how["method"] != "int8"
    model.is_loaded_in_4bit, model.is_loaded_in_8bit, model.is_quantized = four, not four, True
    model.quantization_method, model.hf_device_map = "bitsandbytes", {"": 0}
    described = transformers.BitsAndBytesConfig(load_in_4bit=four, load_in_8bit=not four)
    model.hf_quantizer = type("Quantizer", (), {"is_trainable": True, "is_qat_trainable": False, "quantization_config": described})()
    model.config.quantization_config = described
    return model


def _quantized_linear(linear: torch.nn.Linear, how: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    import bitsandbytes as bnb

    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    if how["method"] == "int8":
        new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")
        new.weight = bnb.nn.Int8Params(
            torch.empty(linear.weight.shape, dtype=torch.float16), requires_grad=False, has_fp16_weights=False
        ).to("cuda")
    else:
        double = how.get("double_quant", False)
        new = bnb.nn.Linear4bit(*sizes, compute_dtype=_dtype(how.get("compute_dtype", "bfloat16")), compress_statistics=double,
                                quant_type=how["method"], device="meta")  # fmt: skip
        weight = bnb.nn.Params4bit(torch.empty(linear.weight.shape, dtype=dtype), requires_grad=False, quant_type=how["method"],
                                   compress_statistics=double, module=new)  # fmt: skip
        new.weight = weight.to("cuda")
    if linear.bias is not None:
        new.bias = torch.nn.Parameter(torch.empty(linear.bias.shape, dtype=dtype, device="cuda"), requires_grad=False)
    return new.requires_grad_(False)


def _with_adapters(spec: Spec, model: torch.nn.Module) -> torch.nn.Module:
    import peft

    arguments = dict(spec["lora"])
    autocast_adapter_dtype = arguments.pop("autocast_adapter_dtype", True)
    if spec.get("quantization"):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=bool(spec.get("checkpointing")))
    elif spec.get("checkpointing") and spec["loop"] not in ("trainer", "sft"):
        model.enable_input_require_grads()
    tasks = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}
    arguments.setdefault("task_type", tasks.get(spec["model"].get("task") or "AutoModelForCausalLM"))
    return peft.get_peft_model(model, peft.LoraConfig(**arguments), autocast_adapter_dtype=autocast_adapter_dtype)


# ---------------------------------------------------------------- batches
def example(spec: Spec, model: torch.nn.Module) -> dict[str, Any]:
    """One sample of full length."""
    n, config = spec["seq_len"], cast(Any, getattr(model, "config", None))
    inputs = spec["model"].get("inputs")
    if inputs:
        return {name: _sample(shape, n) for name, shape in inputs.items()}
    task = spec["model"].get("task") or ""
    kind = getattr(config, "model_type", "")
    if "Image" in task or hasattr(config, "image_size") and not hasattr(config, "text_config") and not hasattr(config, "vocab_size"):
        return {"pixel_values": torch.zeros(getattr(config, "num_channels", 3), config.image_size, config.image_size), "labels": 0}
    if kind == "whisper":
        features = torch.zeros(config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": torch.ones(n, dtype=torch.long)}
    out: dict[str, Any] = {"input_ids": torch.ones(n, dtype=torch.long)}
    if spec.get("mask", True):
        out["attention_mask"] = torch.ones(n, dtype=torch.long)
    whole = task.endswith("SequenceClassification")
    out["labels"] = torch.zeros((), dtype=torch.long) if whole else torch.ones(spec.get("target_seq_len") or n, dtype=torch.long)
    return out


def _sample(described: Mapping[str, Any], seq_len: int) -> torch.Tensor:
    shape = [seq_len if d == "seq" else d for d in described["shape"] if d != "batch"]
    return torch.ones(shape, dtype=_dtype(described.get("dtype", "int64")))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def batch_of(spec: Spec, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return collate([example(spec, model)] * spec["micro_batch_size"])


def rows_of(spec: Spec, model: torch.nn.Module, world: int) -> list[dict[str, Any]]:
    """Samples for one step more than is run."""
    return [example(spec, model)] * (spec["micro_batch_size"] * spec.get("gradient_accumulation_steps", 1) * world * (spec["steps"] + 1))


def loss_of(spec: Spec, output: Any) -> torch.Tensor:
    """The scalar that is made of a factory's output ("output.loss", "output", "sum"); the loss of a Hugging Face model."""
    how = spec["model"].get("loss") or "output.loss"
    if how == "output.loss":
        return output["loss"] if isinstance(output, dict) else output.loss
    return output.float().sum() if how == "sum" else output


# ---------------------------------------------------------------- the optimizer
def optimizer_of(spec: Spec, model: torch.nn.Module) -> torch.optim.Optimizer:
    cls, arguments = optimizer_class(spec, model)
    given = [arguments.pop(name) for name in ("params", "model") if name in arguments]  # GaLore's groups, LOMO's model
    made = cls(given[0] if given else [p for p in model.parameters() if p.requires_grad], **arguments)
    if (spec.get("optimizer") or {}).get("implementation") == "cpu" and spec["loop"] == "deepspeed":
        from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

        return map_pytorch_optim_to_deepspeed(made)
    return made


def optimizer_class(spec: Spec, model: torch.nn.Module) -> tuple[Any, dict[str, Any]]:
    """As the Trainer chooses by the optimizer's name (Trainer.get_optimizer_cls_and_kwargs), else the class with its defaults."""
    described = spec.get("optimizer") or {"names": ["adamw_torch"], "class": "torch.optim.AdamW"}
    chosen = _chosen_by_transformers(described, model)
    if chosen is None:
        module, _, name = described["class"].rpartition(".")
        chosen = getattr(importlib.import_module(module), name), {"lr": 1e-4}
    cls, arguments = chosen
    accepted = inspect.signature(cls).parameters
    wanted = {**IMPLEMENTATIONS.get(described.get("implementation", ""), {}), **described.get("params", {})}
    return cls, {**arguments, **{name: value for name, value in wanted.items() if name in accepted}}


def _chosen_by_transformers(described: Mapping[str, Any], model: Any) -> tuple[Any, dict[str, Any]] | None:
    try:
        from transformers import Trainer, TrainingArguments
        from transformers.training_args import OptimizerNames
    except ImportError:  # a plain loop in an environment without it
        return None
    known = {member.value for member in OptimizerNames}
    name = next((name for name in described["names"] if name in known), None)
    if name is None:
        return None
    # its settings alone: an instance would start up devices and process groups before the loop does
    defaults = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(TrainingArguments)}
    settings = SimpleNamespace(**{**defaults, "optim": name, "optim_target_modules": "all-linear", "parallel_mode": None})
    return cast(tuple[Any, dict[str, Any]], Trainer.get_optimizer_cls_and_kwargs(cast(Any, settings), model))


# ---------------------------------------------------------------- the loops
def run_trainer(spec: Spec, argv: list[str]) -> None:
    import transformers

    arguments = _arguments(spec, argv, transformers.TrainingArguments)
    model = build(spec)
    rows = rows_of(spec, model, max(1, arguments.world_size))
    evaluated = rows[: spec["eval_rows"]] if spec.get("eval_rows") else None
    train(spec, transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=evaluated, data_collator=collate))


def train(spec: Spec, trainer: Any) -> None:
    if spec.get("optimizer"):
        trainer.optimizer_cls_and_kwargs = optimizer_class(spec, trainer.model)
    trainer.train()


def run_sft(spec: Spec, argv: list[str]) -> None:
    import trl
    from datasets import Dataset

    given = {**spec, "training_arguments": {"dataset_kwargs": {"skip_prepare_dataset": True}, **spec.get("training_arguments", {})}}
    arguments = _arguments(given, argv, trl.SFTConfig)
    model = build(spec)
    row = {name: value.tolist() for name, value in example(spec, model).items() if name != "attention_mask"}
    data = Dataset.from_list([row] * len(rows_of(spec, model, max(1, arguments.world_size))))
    train(spec, trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=_tokenizer()))


def run_dpo(spec: Spec, argv: list[str]) -> None:
    """Pairs of full length; the reference is a second model, or with adapters the same one without them."""
    import trl
    from datasets import Dataset

    arguments = _arguments(spec, argv, trl.DPOConfig)
    model = build(spec)
    reference = None if spec.get("lora") else build(spec).eval()
    half = spec["seq_len"] // 2
    row = {"prompt": "a " * half, "chosen": "a " * (spec["seq_len"] - half), "rejected": "a " * (spec["seq_len"] - half)}
    data = Dataset.from_list([row] * len(rows_of(spec, model, max(1, arguments.world_size))))
    train(spec, trl.DPOTrainer(model, reference, args=arguments, train_dataset=data, processing_class=_tokenizer()))


def _tokenizer() -> Any:
    """Every word is a token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def _arguments(spec: Spec, argv: list[str], kind: Any) -> Any:
    """The user's own training arguments, ended after the steps of the spec."""
    import transformers

    own = {"output_dir": tempfile.mkdtemp(), "max_steps": spec["steps"], "report_to": [], "disable_tqdm": True, "logging_strategy": "no",
           "save_strategy": "steps" if spec.get("save") else "no", "save_steps": spec["steps"]}  # fmt: skip
    given = {**own, **spec.get("training_arguments", {})}
    if not argv:
        return kind(**given)
    parser = transformers.HfArgumentParser(kind, allow_abbrev=False)
    known, _ = parser.parse_known_args([*argv, "--output_dir", own["output_dir"], "--max_steps", str(spec["steps"]), "--report_to", "none"])
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{**{k: v for k, v in vars(known).items() if k in fields}, **given})


def run_accelerate(spec: Spec, argv: list[str]) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DummyOptim

    accelerator = Accelerator(**spec.get("accelerator", {}))
    model = build(spec)
    rows = rows_of(spec, model, accelerator.num_processes)
    loader = torch.utils.data.DataLoader(rows, batch_size=spec["micro_batch_size"], collate_fn=collate)
    optimizer = DummyOptim(model.parameters(), lr=1e-4) if spec.get("ds_dummy_optimizer") else optimizer_of(spec, model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(spec, model(**batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients and spec.get("max_grad_norm"):
                accelerator.clip_grad_norm_(model.parameters(), spec["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            done += accelerator.sync_gradients
        del loss, batch
        if done == spec["steps"]:
            break
    if spec.get("save"):
        accelerator.save_state(tempfile.mkdtemp())


def run_deepspeed(spec: Spec, argv: list[str]) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl")
    config = spec["ds_config"]
    config = json.loads(Path(config).read_text()) if isinstance(config, str) else config
    with deepspeed.zero.Init(config_dict_or_path=config) if spec.get("zero_init") else contextlib.nullcontext():
        model = build(spec)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(spec, model) if spec.get("optimizer") else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trainable, config=config)
    dtype = next(engine.module.parameters()).dtype
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch_of(spec, engine.module).items()}
    for _ in range(spec["steps"] * spec.get("gradient_accumulation_steps", 1)):
        on_card = {name: t.to("cuda") for name, t in batch.items()}
        loss = loss_of(spec, engine(**on_card))
        del on_card
        engine.backward(loss)
        del loss
        engine.step()
    if spec.get("save"):
        engine.save_checkpoint(tempfile.mkdtemp())


def run_torch(spec: Spec, argv: list[str]) -> None:
    """A plain loop on one card, or wrapped in DDP, FSDP1 or FSDP2."""
    wrap = spec.get("wrap")
    if wrap:
        torch.distributed.init_process_group("nccl")
        torch.cuda.set_device(_local_rank())
    model = WRAPPERS[wrap](build(spec), spec.get("wrap_options", {}))
    optimizer = optimizer_of(spec, model)
    scaler = torch.amp.GradScaler("cuda", enabled=bool(spec.get("grad_scaler")))
    batch, accumulation = batch_of(spec, getattr(model, "module", model)), spec.get("gradient_accumulation_steps", 1)
    for _ in range(spec["steps"]):
        for i in range(accumulation):
            _micro_batch(spec, model, batch, scaler, accumulation, last=i == accumulation - 1)
        if spec.get("max_grad_norm"):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec["max_grad_norm"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=spec.get("zero_grad_set_to_none", True))


def _micro_batch(spec: Spec, model: Any, batch: Mapping[str, torch.Tensor], scaler: Any, accumulation: int, last: bool) -> None:
    on_card = {name: t.to("cuda") for name, t in batch.items()}
    if spec.get("wrap") == "fsdp2":
        model.set_requires_gradient_sync(last)
    with model.no_sync() if spec.get("wrap") in ("ddp", "fsdp1") and not last else contextlib.nullcontext():
        autocast = spec.get("autocast")
        with torch.autocast("cuda", _dtype(autocast)) if autocast else contextlib.nullcontext():
            loss = loss_of(spec, model(**on_card))
            del on_card
        scaler.scale(loss / accumulation).backward()


def _local_rank() -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))


# ---------------------------------------------------------------- wrappers of the plain loop
def _alone(model: torch.nn.Module, options: Mapping[str, Any]) -> torch.nn.Module:
    return model.to("cuda")


def _ddp(model: torch.nn.Module, options: Mapping[str, Any]) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model.to("cuda"), device_ids=[_local_rank()], **options)


def _layer_classes(model: torch.nn.Module, options: Mapping[str, Any]) -> set[type]:
    names = set(options.get("wrap_classes") or getattr(model, "_no_split_modules", None) or ())
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def _fsdp1(model: torch.nn.Module, options: Mapping[str, Any]) -> torch.nn.Module:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=_layer_classes(model, options))
    mixed, prefetch = options.get("param_dtype"), options.get("backward_prefetch", "BACKWARD_PRE")
    precision = MixedPrecision(_dtype(mixed), _dtype(options.get("reduce_dtype", mixed)), _dtype(mixed)) if mixed else None
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=_local_rank(), mixed_precision=precision,
        use_orig_params=options.get("use_orig_params", True),
        sharding_strategy=ShardingStrategy[options.get("sharding_strategy", "FULL_SHARD")],
        backward_prefetch=BackwardPrefetch[prefetch] if prefetch else None, forward_prefetch=options.get("forward_prefetch", False),
        limit_all_gathers=options.get("limit_all_gathers", True), cpu_offload=CPUOffload(True) if options.get("cpu_offload") else None,
    )  # fmt: skip


def _fsdp2(model: torch.nn.Module, options: Mapping[str, Any]) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": options.get("reshard_after_forward", True)}
    if options.get("param_dtype"):
        reduce = options.get("reduce_dtype", options["param_dtype"])
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=_dtype(options["param_dtype"]), reduce_dtype=_dtype(reduce))
    if options.get("cpu_offload"):
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=options.get("pin_memory", True))
    layers = _layer_classes(model, options)
    for module in [module for module in model.modules() if type(module) in layers]:
        fully_shard(module, **arguments)
    fully_shard(model, **arguments)
    return model if options.get("cpu_offload") else model.to("cuda")


WRAPPERS: dict[str | None, Callable[[torch.nn.Module, Mapping[str, Any]], torch.nn.Module]] = {
    None: _alone, "ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2,
}  # fmt: skip
LOOPS: dict[str, Callable[[Spec, list[str]], None]] = {
    "trainer": run_trainer, "sft": run_sft, "dpo": run_dpo, "accelerate": run_accelerate, "deepspeed": run_deepspeed, "torch": run_torch,
}  # fmt: skip

if __name__ == "__main__":
    path, *rest = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]  # DeepSpeed's launcher puts it in front
    loaded = json.loads(Path(path).read_text())
    LOOPS[loaded["loop"]](loaded, rest)
