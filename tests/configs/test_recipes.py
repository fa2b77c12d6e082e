"""What axolotl's YAML, quantised checkpoints and the less common trainers say."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("stated", "method", "noted"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq4", False),
        ({"quant_method": "awq", "bits": 4}, "gptq4", True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4", False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", False),
        ({"quant_method": "fp8"}, None, True),
    ],
)
def test_a_checkpoint_that_was_saved_quantised(work: Any, codes: Any, stated: dict[str, Any], method: str | None, noted: bool) -> None:
    config = json.loads((work.path / "m/config.json").read_text())
    work.write("m/config.json", {**config, "quantization_config": stated})
    job = work.resolve("python train.py --model_name_or_path m --output_dir out --finetuning_type lora")
    assert (job.quantization.method if job.quantization else None) == method and ("LG310" in codes(job)) == noted


def test_trainers_of_trl_without_rules_name_their_model_too(work: Any, codes: Any) -> None:
    work.write("grpo.py", "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(per_device_train_batch_size=4)\n"
                          "trainer = GRPOTrainer(model='m', args=args)\n")  # fmt: skip
    job = work.resolve("accelerate launch --num_processes 2 grpo.py")
    assert job.model.source == "m" and job.micro_batch_size == 4 and "LG321" in codes(job)


@pytest.mark.parametrize(("head", "version"), [("fsdp_version: 2\n", 2), ("", 1)])
def test_fsdp_of_axolotl(work: Any, codes: Any, head: str, version: int) -> None:
    config = "offload_params: true, auto_wrap_policy: TRANSFORMER_BASED_WRAP, transformer_layer_cls_to_wrap: LlamaDecoderLayer"
    work.write("c.yml", f"base_model: m\nbf16: true\n{head}fsdp_config: {{{config}}}\n")
    job = work.resolve("accelerate launch --num_processes 2 -m axolotl.cli.train c.yml")
    assert job.strategy == f"fsdp{version}" and job.fsdp.offload_params and job.fsdp.wrap_classes == ("LlamaDecoderLayer",)
    assert "LG223" not in codes(job)
