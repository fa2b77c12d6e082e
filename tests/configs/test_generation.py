"""Jobs that generate: predict_with_generate, TRL's online trainers, the engine beside the training."""

from __future__ import annotations

from typing import Any

import pytest

SEQ2SEQ = "from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments\ntrainer = Seq2SeqTrainer(model=m, compute_metrics=f)\n"
LAYER = 4 * 16  # heads x head size of the tiny Llama


def grpo(work: Any, arguments: str) -> None:
    work.write("grpo.py", f"from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(per_device_train_batch_size=4, {arguments})\n"
                          "trainer = GRPOTrainer(model='m', args=args)\n")  # fmt: skip


def test_an_evaluation_that_generates_keeps_tokens_and_fills_a_cache(work: Any, codes: Any) -> None:
    work.write("train.py", SEQ2SEQ)
    line = "python train.py --model_name_or_path m --output_dir out --max_length 64 --eval_strategy steps --predict_with_generate"
    job = work.resolve(f"{line} --per_device_eval_batch_size 2 --generation_max_length 100 --generation_num_beams 4")
    assert job.evaluation.reduced and {"LG340"} <= codes(job) and "LG310" not in codes(job)
    assert job.generation.sequences == 8 and job.generation.by == "evaluation" and not job.generation.whole
    assert job.generation.cache_bytes == 2 * 2 * 8 * (100 + 64) * LAYER * 2  # keys and values, layers, sequences, tokens, bfloat16
    assert work.resolve(line.replace(" --predict_with_generate", "")).generation is None


@pytest.mark.parametrize(("stage", "gather", "whole"), [(3, "", True), (3, "ds3_gather_for_generation=False", False), (2, "", False)])
def test_rollouts_gather_zero3(work: Any, codes: Any, stage: int, gather: str, whole: bool) -> None:
    grpo(work, f"bf16=True, max_completion_length=128, gradient_accumulation_steps=2, {gather}")
    work.write(
        "ds.yaml", f"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {{zero_stage: {stage}}}\nmixed_precision: bf16\n"
    )
    job = work.resolve("accelerate launch --config_file ds.yaml grpo.py")
    assert (job.strategy, job.zero.stage, job.generation.whole) == ("zero", stage, whole)
    assert job.seq_len == 512 + 128 and job.generation.sequences == 4 * 2 and {"LG210", "LG321", "LG340"} <= codes(job)


def test_vllm_beside_the_training_takes_its_share(work: Any, codes: Any) -> None:
    grpo(work, "use_vllm=True, vllm_gpu_memory_utilization=0.4")
    job = work.resolve("accelerate launch --num_processes 2 grpo.py")
    assert job.device_share == 0.4 and job.generation.sync and job.generation.cache_bytes == 0
    grpo(work, "use_vllm=True, vllm_mode='server'")
    assert work.resolve("accelerate launch --num_processes 2 grpo.py").device_share == 0.0


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [("DPO", "", True), ("DPO", "--use_peft", False), ("GRPO", "--beta 0.04", True), ("GRPO", "", False), ("SFT", "", False)],
)
def test_a_reference_model_stays_beside_the_trained_one(work: Any, codes: Any, script: str, arguments: str, expected: bool) -> None:
    work.write("train.py", f"from trl import {script}Config, {script}Trainer\ntrainer = {script}Trainer(model='m')\n")
    job = work.resolve(f"python train.py --model_name_or_path m --output_dir out {arguments}".rstrip())
    assert job.reference == expected and ("LG341" in codes(job)) == expected
