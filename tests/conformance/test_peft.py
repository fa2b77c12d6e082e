"""Adapters and quantised bases as launchguard traces them against real PEFT, transformers and bitsandbytes on the CPU: which parameters
there are, their dtypes, what is trained, what is stored. (The trace runs PEFT's own layers on stand-ins of bitsandbytes' ones.)
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launchguard.job import JobSpec, LaunchSpec, LoraSpec, ModelSpec, Precision, QuantizationSpec
from launchguard.profiles import device
from launchguard.trace import trace_job
from launchguard.units import dtype_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 200, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip

CASES: dict[str, tuple[LoraSpec, QuantizationSpec | None]] = {
    "lora": (LoraSpec(r=4, target_modules=("q_proj", "v_proj")), None),
    "lora-bf16": (LoraSpec(r=4, target_modules="all-linear", autocast_adapter_dtype=False), None),
    "lora-bias": (LoraSpec(r=4, target_modules="all-linear", bias="all", lora_dropout=0.1), None),
    "dora": (LoraSpec(r=4, target_modules="all-linear", use_dora=True), None),
    "save": (LoraSpec(r=4, target_modules=("q_proj",), modules_to_save=("lm_head", "embed_tokens")), None),
    "nf4": (LoraSpec(r=4, target_modules="all-linear"), QuantizationSpec("nf4")),
    "fp4-double": (LoraSpec(r=4, target_modules="all-linear"), QuantizationSpec("fp4", double_quant=True)),
    "nf4-storage": (LoraSpec(r=4, target_modules=("q_proj",)), QuantizationSpec("nf4", True, quant_storage="bfloat16", prepare_kbit=False)),
    "int8": (LoraSpec(r=4, target_modules=("q_proj",)), QuantizationSpec("int8")),
    "nf4-save": (LoraSpec(r=4, target_modules=("q_proj",), modules_to_save=("lm_head",)), QuantizationSpec("nf4", prepare_kbit=False)),
}


def real_model(lora: LoraSpec, quantization: QuantizationSpec | None, folder: Path) -> Any:
    """As a script loads it: from_pretrained in bfloat16, prepare_model_for_kbit_training, get_peft_model."""
    arguments: dict[str, Any] = {}
    if quantization is not None:
        pytest.importorskip("bitsandbytes")
        four = {} if quantization.method == "int8" else dict(
            load_in_4bit=True, bnb_4bit_quant_type=quantization.method, bnb_4bit_use_double_quant=quantization.double_quant,
            bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=getattr(torch, quantization.quant_storage),
        )  # fmt: skip
        arguments["quantization_config"] = transformers.BitsAndBytesConfig(**(four or {"load_in_8bit": True}))
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **arguments)
    if quantization is not None and quantization.prepare_kbit:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    fields = {k: v for k, v in dataclasses.asdict(lora).items() if k != "autocast_adapter_dtype" and v not in (None, ())}
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields), autocast_adapter_dtype=lora.autocast_adapter_dtype)


def stored(p: Any) -> int:
    """Bytes of a parameter with its quantisation state."""
    state = getattr(p, "quant_state", None)
    held = [p, *tensors(state)] if state is not None else [p, *[t for t in (getattr(p, "SCB", None),) if t is not None]]
    return sum(t.untyped_storage().nbytes() for t in held)


def tensors(state: Any) -> list[Any]:
    found = [v for v in vars(state).values() if isinstance(v, torch.Tensor)]
    return found + [t for v in vars(state).values() if type(v).__name__ == "QuantState" for t in tensors(v)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(**CONFIG)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_parameters(name: str, folder: Path, residuals: list[Any]) -> None:
    """Every parameter by name: dtype, whether it is trained, bytes; and all bytes of states kept beside them."""
    lora, quantization = CASES[name]
    real = real_model(lora, quantization, folder)
    config = json.loads((folder / "config.json").read_text())
    precision = Precision(load="bfloat16", storage="bfloat16", compute="bfloat16")
    job = JobSpec(LaunchSpec("python", (), ".", "train.py"), ModelSpec(str(folder), config), seq_len=16, precision=precision, lora=lora,
                  quantization=quantization)  # fmt: skip
    trace = trace_job(job, device("a100-80-sxm"), use_cache=False)
    theirs = {n: (str(p.dtype).removeprefix("torch."), p.requires_grad, p.numel()) for n, p in real.named_parameters()}
    ours = {p.name: (p.dtype, p.requires_grad, p.numel) for p in trace.params}
    assert ours == theirs
    ours_bytes = sum(p.numel * dtype_bytes(p.dtype) for p in trace.params) + sum(trace.buffer_bytes)
    real_bytes = sum(stored(p) for p in real.parameters()) + sum(b.untyped_storage().nbytes() for b in real.buffers())
    residuals.append((f"peft {name}", "loaded", "bytes", ours_bytes, real_bytes))
    assert ours_bytes == real_bytes
