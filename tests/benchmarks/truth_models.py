"""The model of a measured case: a config that launchguard reads as it is, or a factory of tests/measured/factories.py with what the case
says beyond a config (loss, selective or offloaded checkpointing, a tensor-parallel rank, modules given by their dimensions)."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from launchguard.job import InputTensor, ModelSpec, Note

Case = dict[str, Any]
FACTORIES = str(Path(__file__).resolve().parents[1] / "measured")
# libraries with model code of their own call torch's GELU where transformers writes "gelu_new" out in five operations
KERNEL_GELU = {"litgpt": "gelu_pytorch_tanh", "composer": "gelu"}
TOKENS = {"input_ids": InputTensor(("batch", "seq")), "labels": InputTensor(("batch", "seq"))}
TRAINER_STACKS = ("hf_trainer", "llama-factory", "fms", "ms-swift", "axolotl", "trl")
MEGATRON_STACKS = ("megatron-deepspeed", "megatron-lm", "megatron-bridge")


class NotRun(Exception):
    """Why a case cannot be simulated."""


def model_of(case: Case, folder: Path, load: str, notes: list[Note]) -> ModelSpec:
    """Raises NotRun for a model that neither way can describe."""
    model = case["model"]
    if not model.get("config"):
        return _described(case)
    config = config_of(case, folder)
    attention = _attention(case)
    if config.get("architectures", [""])[0].startswith("ResNet"):
        return _described({**case, "model": {"factory": "torchvision.models.resnet50"}})
    if is_litgpt(case):
        return _litgpt(case, config, load)
    tp = case["parallel"].get("tp") or 1
    if tp > 1 and case["stack"] in MEGATRON_STACKS:
        checkpoint = checkpoint_of(case) or {"kind": "every" if case["activation_checkpointing"] == "full" else "none"}
        kwargs = {"config": config, "seq": case["seq_len"], "tp": tp, "checkpoint": checkpoint["kind"], "load": load}
        return _factory("megatron_gpt", kwargs, TOKENS)
    special = (
        _special(case) if str((config.get("architectures") or ["ForCausalLM"])[0]).endswith(("ForCausalLM", "GPT2LMHeadModel")) else {}
    )
    if tp > 1 or any(special.values()):
        if not {"num_attention_heads", "intermediate_size"} <= set(config) and tp > 1:
            raise NotRun("tensor parallelism of this architecture")
        kwargs = {"config": config, "load": load, "attention": _traceable(attention, config), "tp": tp, **special}
        return _factory("causal_lm", kwargs, TOKENS)
    return ModelSpec(
        source=model["config"],
        config=config,
        task=model.get("auto_class"),
        attn_implementation=attention,
        use_cache=model.get("use_cache", None if case["stack"] == "custom script" else False),  # a plain model(**batch) keeps its cache
        inputs=_two_lengths(case),
    )


def is_litgpt(case: Case) -> bool:
    """Cases of its fine-tuning scripts: the model and its adapters are litgpt's own."""
    return case["stack"] == "litgpt" and case["method"]["type"] in ("full", "lora", "qlora")


def _litgpt(case: Case, config: dict[str, Any], load: str) -> ModelSpec:
    method = case["method"]
    words = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "proj", "mlp (all linears)": "mlp", "lm_head": "head"}
    first = str((case.get("versions") or {}).get("litgpt", "")) == "8641822"  # the commit of its resource tables, 2023-10-20
    kwargs = {"config": config, "load": load, "seq": case["seq_len"], "rank": method.get("r"), "upcast_norms": not first or None,
              "parts": [words[t] for t in method.get("targets") or ()]}  # fmt: skip
    spec = _factory("build", kwargs, TOKENS)
    return dataclasses.replace(spec, source="litgpt_model:build", kwargs={**spec.kwargs, "upcast_norms": not first})


def _special(case: Case) -> dict[str, Any]:
    """What of a decoder only a factory can say; empty values: nothing."""
    return {
        "loss": _loss(case),
        "checkpoint": checkpoint_of(case),
        "liger": _liger_layers(case),
        "tiled": "tiled over the sequence" in str(case.get("activation_checkpointing_detail")),
        "rename_linears": adapters_apart(case),
    }


def _factory(name: str, kwargs: dict[str, Any], inputs: dict[str, InputTensor]) -> ModelSpec:
    return ModelSpec(source=f"factories:{name}", kwargs={k: v for k, v in kwargs.items() if v not in (None, False)}, inputs=inputs,
                     loss="output.loss", python_path=FACTORIES)  # fmt: skip


def config_of(case: Case, folder: Path) -> dict[str, Any]:
    """The config file with the case's own vocabulary, image size and length of positions."""
    model, seq = case["model"], case.get("seq_len")
    config: dict[str, Any] = json.loads((folder / model["config"]).read_text())
    if model.get("vocab_size"):
        config["vocab_size"] = model["vocab_size"]
    if case.get("image_size"):
        config["image_size"] = case["image_size"]
    for key in ("hidden_act", "activation_function"):
        if config.get(key) == "gelu_new" and case["stack"].split()[0] in KERNEL_GELU:
            config[key] = KERNEL_GELU[case["stack"].split()[0]]
    for key in ("max_position_embeddings", "n_positions"):
        if seq and config.get(key, 1 << 60) < seq:
            config[key] = seq
    return config


def _two_lengths(case: Case) -> dict[str, InputTensor]:
    """Inputs of an encoder-decoder whose targets have a length of their own; {}: those of the model's task."""
    if not case.get("target_len"):
        return {}
    source = InputTensor(("batch", "seq"))
    return {"input_ids": source, "attention_mask": source, "labels": InputTensor(("batch", case["target_len"]))}


def _attention(case: Case) -> str | None:
    recorded = (case.get("inputs") or {}).get("script", {}).get("attn")
    if case["stack"] == "vgpu":
        return recorded  # the recorded script left the choice to the model unless it says so
    return {"flash2": "flash_attention_2", "flash3": "flash_attention_3", "none": None}.get(case["attention"], case["attention"])


def _traceable(attention: str | None, config: dict[str, Any]) -> str | None:
    """flash-attn's packages need a GPU to import; SDPA's flash kernel allocates the same. Soft-capped scores have neither in SDPA."""
    if config.get("attn_logit_softcapping") or config.get("model_type") == "gemma2":
        return None
    return "sdpa" if attention and attention.startswith("flash_attention") else attention


def _loss(case: Case) -> dict[str, Any] | None:
    """The loss by what the case says of it; None: the loss of the model's own class (logits upcast to float32)."""
    kind, detail = case["loss"], (case.get("loss_detail") or "").lower()
    if case["stack"] == "vgpu":  # recorded through the real entry points: the loop says what its loss is
        return None
    if case["stack"] == "composer" and kind == "full_logits_fp32" and not detail:  # llm-foundry's default, without which it does not start
        return {"kind": "flash"}
    number = int((re.findall(r"(?:chunks of |over )(\d+)", detail) or ["0"])[0])
    if kind == "fused":
        return {"kind": "cut" if "cut" in detail else "fused_linear"}
    if kind == "chunked":
        if "output chunks" in detail:
            return {"kind": "output_chunks", "chunk": number or 8}
        if "policy" in detail or "lm head in chunks" in detail:
            return {"kind": "vocabulary_chunks", "chunk": number or 2048}
        return {"kind": "chunked_head" if "head" in detail else "chunked_cross_entropy", "chunk": number or 128}
    if "torchtune ce" in detail:
        return {"kind": "output_chunks", "chunk": 8}  # CEWithChunkedOutputLoss, its recipes' default
    if kind == "full_logits":
        return {"kind": "triton" if "triton" in detail else "compute_dtype"}
    return None


def checkpoint_of(case: Case) -> dict[str, str] | None:
    """Checkpointing that a factory does itself; None: none, or the library's own on every layer."""
    kind, detail = case["activation_checkpointing"], (case.get("activation_checkpointing_detail") or "").lower()
    if kind == "full" and ("cpu" in detail or "activation_offload" in (case["tags"] or ())):
        return {"kind": "offload"}
    if "every second layer" in detail:
        return {"kind": "every_second"}
    if kind != "selective":
        return None
    if "per-op" in detail:
        return {"kind": "selective_ops"}
    if "core attention" in detail and case["attention"] != "eager":
        return None  # a fused kernel keeps nothing of the core to drop
    raise NotRun(f"selective checkpointing: {detail or 'not stated'}")


def _liger_layers(case: Case) -> bool:
    """Libraries that give the whole model to Liger (apply_liger_kernel_to_*); others take its loss alone."""
    return "liger" in (case.get("loss_detail") or "").lower() and case["stack"] in ("arctic_training", "hf_trainer", "trl", "llama-factory")


def adapters_apart(case: Case) -> bool:
    """Adapters in FSDP1 units of their own (where the case says so, and under the Trainer: peft.utils.other.fsdp_auto_wrap_policy): a wrap
    policy by class needs them to differ in class from what they adapt."""
    framework = case["framework"]
    trained_apart = framework["name"] == "fsdp1" and case["stack"] in TRAINER_STACKS
    return case["method"]["type"] != "full" and ("on their own" in str(framework.get("wrap") or "") or trained_apart)


def _described(case: Case) -> ModelSpec:
    """Models given by dimensions or by a library's factory."""
    model, dims = case["model"], case["model"].get("dims") or {}
    factory = model.get("factory") or ""
    if factory.startswith("torchvision.models."):
        name = factory.rpartition(".")[2]
        if name not in ("vgg16", "efficientnet_b0", "resnet50"):
            _require_torchvision(name)
        size = case.get("image_size") or 224
        return _factory(
            "torchvision_model",
            {"name": name},
            {"pixel_values": InputTensor(("batch", 3, size, size), "float32"), "labels": InputTensor(("batch",))},
        )
    if {"encoder_layers", "decoder_layers", "vocab"} <= set(dims):
        kwargs = {
            "d_model": dims["d_model"],
            "ffn": dims["ffn"],
            "layers": dims["encoder_layers"],
            "heads": dims["heads"],
            "vocab": dims["vocab"],
        }
        return _factory("DemoTransformer", kwargs, TOKENS)
    if {"dim", "hidden_dim"} <= set(dims):
        kwargs = {**dims, "tp": case["parallel"].get("tp") or 1}
        spec = _factory("FeedForward", kwargs, {"x": InputTensor(("batch", dims["dim"]), "float32")})
        return ModelSpec(**{**spec.__dict__, "loss": "sum"})
    raise NotRun("no config, and no factory for such dimensions")


def _require_torchvision(name: str) -> None:
    import importlib.util

    if importlib.util.find_spec("torchvision") is None:
        raise NotRun(f"{name} needs torchvision")


# ------------------------------------------------------------------------------------------------ LoRA targets
# one name for what architectures call differently: the schema's words (Llama's names) -> module names of other families
TARGETS = {
    "q_proj": "q_proj|qkv_proj|query_key_value|c_attn|q_lin|query|qkv",
    "k_proj": "k_proj|qkv_proj|query_key_value|c_attn|k_lin|key|qkv",
    "v_proj": "v_proj|qkv_proj|query_key_value|c_attn|v_lin|value|qkv",
    "qkv": "q_proj|k_proj|v_proj|qkv_proj|query_key_value|c_attn|qkv",
    "o_proj": r"o_proj|out_proj|(?<=self_attn\.)dense|(?<=self_attention\.)dense|(?<=attention\.)dense",
    "gate_proj": "gate_proj|gate_up_proj",
    "up_proj": "up_proj|gate_up_proj",
    "down_proj": "down_proj",
    "mlp (all linears)": r"(?<=mlp\.)(?!act|dropout)\w+",
}


def lora_targets(targets: list[str] | str, notes: list[Note]) -> tuple[str, ...] | str:
    """What peft.LoraConfig takes: a list of names where every word is one, "all-linear", or a pattern over the names of all families."""
    if isinstance(targets, str):
        return targets
    if any(t.startswith("all linears") for t in targets):
        return "all-linear"
    words = [t for t in targets if t != "experts"]
    if len(words) < len(targets):
        notes.append(Note("LG313", "warning", "adapters on fused experts are left out"))
    return rf".*\b({'|'.join(TARGETS.get(t, re.escape(t)) for t in words)})$"
