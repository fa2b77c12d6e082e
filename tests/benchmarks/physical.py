"""python tests/benchmarks/physical.py --python PATH [--kind a6000|t4|a100]: published runs on physical cards, rehearsed; or, with
--predict instead of --python, as `launchguard check` predicts them (a6000, t4).

PATH: an interpreter with a CUDA build of torch; for the A6000 rows with transformers 4.57.6, because newer versions stopped expanding
K and V for grouped-query attention, which changes these peaks. Prints virtual against physical max_memory_allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launchguard import launch, strategies, trace, verdict
from launchguard.job import ActivationCheckpointing, InputTensor, JobSpec, LaunchSpec, LoraSpec, ModelSpec, OptimizerSpec, Precision
from launchguard.profiles import device
from launchguard.rehearsal import build, run, target
from launchguard.rehearsal.stand_in import SCRIPT as SYNTHETIC
from launchguard.trace.cache import cache_dir

TOKENS = InputTensor(("batch", "seq"))
SCRIPT = Path(__file__).resolve().parents[1] / "rehearsal" / "scripts" / "published_loop.py"
LLAMA = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                     "head_dim": 64, "tie_word_embeddings": True},
    "llama-3.2-3b": {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
                     "head_dim": 128, "tie_word_embeddings": True},
    "llama-3.1-8b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "head_dim": 128},
    "qwen2.5-1.5b": {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip
A6000 = [  # model, precision, checkpointing, attention, LoRA rank, measured decimal GB (vramcalc 0.1.2, README)
    ("llama-3.2-1b", "pure", False, "sdpa", 0, 17.51), ("llama-3.2-1b", "pure", True, "sdpa", 0, 13.76),
    ("llama-3.2-1b", "amp", False, "sdpa", 0, 30.55), ("llama-3.2-1b", "amp", True, "sdpa", 0, 25.22),
    ("llama-3.2-1b", "pure", False, "eager", 0, 30.26), ("llama-3.2-3b", "pure", True, "sdpa", 0, 32.15),
    ("qwen2.5-1.5b", "pure", False, "sdpa", 0, 23.40), ("llama-3.2-1b", "pure", False, "sdpa", 16, 10.13),
    ("llama-3.2-1b", "amp", False, "sdpa", 16, 14.52), ("llama-3.2-1b", "amp", True, "sdpa", 16, 9.51),
    ("llama-3.2-3b", "pure", False, "sdpa", 16, 18.98), ("llama-3.1-8b", "pure", True, "sdpa", 16, 20.55),
    ("qwen2.5-1.5b", "pure", False, "sdpa", 16, 13.78),
]  # fmt: skip
T4 = [  # model_type, task, batch, seq, measured bytes (torch-preflight 0.5, tests/calibration/measured_peaks.json)
    ("gpt2", "AutoModelForCausalLM", 4, 128, 2705153536), ("gpt2", "AutoModelForCausalLM", 8, 256, 5736883712),
    ("bert", "AutoModel", 4, 128, 2209738240), ("bert", "AutoModel", 8, 256, 3185408000),
    ("distilbert", "AutoModel", 4, 128, 1354818048), ("distilbert", "AutoModel", 8, 256, 1757328384),
]  # fmt: skip
MISTRAL = {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096}  # fmt: skip
A100 = [  # ranks, micro-batch, measured bytes: fms-acceleration benchmark rows a100-010, -011, -013 (torch 2.4.1, transformers 4.48.1,
    (1, 4, 72434837504), (2, 2, 36225939968), (2, 4, 36226136576),  # Trainer, bf16 parameters, checkpointing, FSDP1 FULL_SHARD)
]  # fmt: skip


def rows(kind: str) -> list[tuple[str, dict[str, Any], float]]:
    """(name, what published_loop.py reads, measured bytes)"""
    if kind == "a6000":
        keys = ("config", "precision", "checkpointing", "attention", "lora")
        return [(f"{m} {p}{' ckpt' if c else ''} {a} lora {r}", dict(zip(keys, (MODELS[m], p, c, a, r))), gb * 1e9)
                for m, p, c, a, r, gb in A6000]  # fmt: skip
    if kind == "a100":
        return [(f"mistral-7b {w} rank{'s' * (w > 1)} b{b}", {"ranks": w, "batch": b}, n) for w, b, n in A100]
    return [(f"{m} b{b} s{s}", {"config": {"model_type": m}, "task": t, "batch": b, "seq": s}, n) for m, t, b, s, n in T4]


def predicted_peak(kind: str, row: dict[str, Any]) -> int:
    """Of the steps after the first, as published_loop.py counts it."""
    job = _a6000_job(row) if kind == "a6000" else _t4_job(row)
    card = device(job.device or "")
    traced = trace.trace_job(job, card)
    judged = verdict.judge(job, traced, strategies.schedules(job, traced, card), card, verdict.device_budget(card, "0%"))
    return max(p.allocated_bytes for p in judged.ranks[0].phases if p.name in ("forward_2", "backward_2", "step_2"))


def _a6000_job(row: dict[str, Any]) -> JobSpec:
    amp = row["precision"] == "amp"
    dtype, targets = "float32" if amp else "bfloat16", ("q_proj", "k_proj", "v_proj", "o_proj")
    return JobSpec(
        launch=LaunchSpec("python", (), ".", SCRIPT.name, nnodes=1, nproc_per_node=1),
        model=ModelSpec(
            "published",
            row["config"],
            "AutoModelForCausalLM",
            row["attention"],
            use_cache=False,
            inputs={"input_ids": TOKENS, "labels": TOKENS},
        ),  # fmt: skip
        loop="torch",
        strategy="single",
        micro_batch_size=1,
        seq_len=2048,
        outputs_alive_in_backward=True,
        outputs_deleted=True,
        zero_grad_set_to_none=False,
        precision=Precision(dtype, dtype, dtype, autocast="bfloat16" if amp else None),
        activation_checkpointing=ActivationCheckpointing(row["checkpointing"]),
        optimizer=OptimizerSpec("adamw", "foreach"),
        lora=LoraSpec(r=row["lora"], lora_alpha=row["lora"], target_modules=targets) if row["lora"] else None,
        device="rtx-a6000",
        versions={"torch": "2.14.1", "transformers": "4.57.6"},
    )


def _t4_job(row: dict[str, Any]) -> JobSpec:
    head, tokens = row["task"].endswith("LM"), {"input_ids": TOKENS}
    model = ModelSpec("published", row["config"], row["task"]) if head else ModelSpec(
        "factories:squared_states", kwargs={"config": row["config"]}, inputs=tokens, loss="output.loss",
        python_path=str(Path(__file__).resolve().parents[1] / "measured"),
    )  # fmt: skip
    return JobSpec(
        launch=LaunchSpec("python", (), ".", SCRIPT.name, nnodes=1, nproc_per_node=1),
        model=model,
        loop="torch",
        strategy="single",
        micro_batch_size=row["batch"],
        seq_len=row["seq"],
        outputs_alive_in_backward=True,
        precision=Precision(autocast="bfloat16"),
        optimizer=OptimizerSpec("adamw", "foreach"),
        device="t4",
        versions={"torch": "2.11.0"},
    )


def virtual_peak(kind: str, row: dict[str, Any], python: str, stubs: build.Stubs) -> int:
    """The peak that the loop prints."""
    card = device("rtx-a6000" if kind == "a6000" else "t4")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "row.json").write_text(json.dumps(row))
        spec = launch.parse(["python", str(SCRIPT), kind, "row.json"], dict(os.environ), folder)
        plan = run.Plan(spec, card, card.total_bytes, (0,), python, stubs, steps=1_000_000, random_weights=True)
        record = run.run(plan, os.environ, lambda text: None)[0]
        if record.result != "ok":
            sys.exit(f"{record.result}: {record.failure} {record.log}")
        return int(next(line for line in record.log.splitlines() if line.startswith("PEAK")).split()[1])


def trainer_peak(row: dict[str, Any], python: str, stubs: build.Stubs) -> int:
    """Mistral-7B by the stand-in's Trainer: alone, or FSDP1 as `accelerate launch` starts it; the peak of two steps on rank 0."""
    card = device("a100-80-sxm")
    fsdp = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "MistralDecoderLayer", "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_use_orig_params": True, "fsdp_sync_module_states": False}  # fmt: skip
    arguments = {"per_device_train_batch_size": row["batch"], "optim": "adamw_torch", "gradient_checkpointing": True,
                 "gradient_checkpointing_kwargs": {"use_reentrant": True}}  # fmt: skip
    spec = {"loop": "trainer", "model": {"config": MISTRAL}, "dtype": "bfloat16", "micro_batch_size": row["batch"], "seq_len": 4096,
            "steps": 2, "training_arguments": arguments}  # fmt: skip
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no", "num_machines": 1,
              "num_processes": row["ranks"], "fsdp_config": fsdp}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "spec.json").write_text(json.dumps(spec))
        (Path(folder) / "fsdp.yaml").write_text(json.dumps(config))  # JSON is YAML
        words = ["python"] if row["ranks"] == 1 else ["accelerate", "launch", "--config_file", "fsdp.yaml"]
        launched = launch.parse([*words, str(SYNTHETIC), "spec.json"], dict(os.environ), folder)
        plan = run.Plan(launched, card, card.total_bytes, (0,), python, stubs, steps=1_000_000, random_weights=True)
        record = run.run(plan, os.environ, lambda text: None)[0]
        if record.result != "ok":
            sys.exit(f"{record.result}: {record.failure} {record.log}")
        return record.allocated_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--python")
    how.add_argument("--predict", action="store_true")
    parser.add_argument("--kind", choices=["a6000", "t4", "a100"], default="a6000")
    arguments = parser.parse_args()
    if arguments.predict and arguments.kind == "a100":
        parser.error("--predict: the a100 rows are cases of tests/measured/cases_dev.yaml (fmsacc-a100-010, -011, -013)")
    environment = None if arguments.predict else target.find_target(arguments.python)
    stubs = None if environment is None else build.build(environment, cache_dir())
    errors = []
    for name, row, measured in rows(arguments.kind):
        if environment is None or stubs is None:
            virtual = predicted_peak(arguments.kind, row)
        elif arguments.kind == "a100":
            virtual = trainer_peak(row, environment.python, stubs)
        else:
            virtual = virtual_peak(arguments.kind, row, environment.python, stubs)
        errors.append(abs(virtual - measured) / measured * 100)
        difference = (virtual - measured) / measured * 100
        how = "check" if arguments.predict else "virtual"
        print(f"{name:40s} physical {measured / 1e9:8.3f} GB  {how} {virtual / 1e9:8.3f} GB  {difference:+.4f} %", flush=True)
    print(f"{len(errors)} rows: mean |difference| {sum(errors) / len(errors):.4f} %, largest {max(errors):.4f} %")


if __name__ == "__main__":
    main()
