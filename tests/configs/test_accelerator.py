"""What an Accelerator makes of `accelerate launch`: FSDP 1 and 2, DDP, single, parallelism, compilation, fp8."""

from __future__ import annotations

import pytest

from launchguard.errors import InputError
from launchguard.job import Origin, Precision

TAIL = " train.py --model m --batch_size 2 --seq_len 32"


def fsdp(version: int = 1, **keys: object) -> str:
    lines = [f"  fsdp_{key}: {value}" for key, value in {"version": version, **keys}.items()]
    return "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n" + "\n".join(lines) + "\n"


def test_single_and_ddp(work) -> None:
    assert work.resolve("accelerate launch --num_processes 1" + TAIL).strategy == "single"
    job = work.resolve("accelerate launch --num_processes 2 --mixed_precision bf16" + TAIL)
    assert (job.loop, job.strategy) == ("accelerate", "ddp")
    assert job.precision == Precision("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16", True)
    assert job.outputs_alive_in_backward and job.max_grad_norm is None
    assert job.ddp is not None and not job.ddp.find_unused_parameters


def test_fsdp1_with_accelerate_s_defaults(work) -> None:
    job = work.resolve("accelerate launch --use_fsdp --num_processes 8 --mixed_precision bf16" + TAIL)
    assert job.strategy == "fsdp1" and job.fsdp is not None
    assert (job.fsdp.wrap_policy, job.fsdp.sharding_strategy, job.fsdp.backward_prefetch) == ("NO_WRAP", "FULL_SHARD", None)
    assert job.fsdp.use_orig_params and job.fsdp.cpu_ram_efficient_loading and job.fsdp.sync_module_states
    assert str(job.origin("fsdp.wrap_policy")).startswith("default of accelerate ")
    assert job.precision == Precision("bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16", True)


def test_fsdp1_keys(work) -> None:
    keys = {"sharding_strategy": "2", "backward_prefetch": "BACKWARD_PRE", "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
    work.write("acc.yaml", fsdp(1, activation_checkpointing=True, offload_params=True, use_orig_params=False, **keys))
    job = work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert job.fsdp is not None
    assert (job.fsdp.sharding_strategy, job.fsdp.backward_prefetch, job.fsdp.min_num_params) == ("SHARD_GRAD_OP", "BACKWARD_PRE", 1000)
    assert job.fsdp.offload_params and not job.fsdp.use_orig_params
    assert job.activation_checkpointing.enabled and job.activation_checkpointing.via == "fsdp"
    assert job.origin("fsdp.sharding_strategy") == Origin("acc.yaml", "fsdp_config.fsdp_sharding_strategy")


def test_fsdp2(work) -> None:
    work.write(
        "acc.yaml", fsdp(2, reshard_after_forward=False, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap="A,B")
    )
    job = work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert job.strategy == "fsdp2" and job.fsdp is not None and not job.fsdp.reshard_after_forward
    assert job.fsdp.wrap_classes == ("A", "B") and job.fsdp.accelerate_grouping
    assert job.precision == Precision("bfloat16", "float32", "bfloat16", None, "bfloat16", False)


def test_fsdp2_without_mixed_precision_keeps_the_load_dtype(work) -> None:
    work.write("acc.yaml", fsdp(2).replace("bf16", "'no'"))
    assert work.resolve("accelerate launch --config_file acc.yaml" + TAIL).precision.storage == "bfloat16"


@pytest.mark.parametrize(
    ("text", "fact"),
    [(fsdp(2, reshard_after_forward="FULL_SHARD"), "neither true nor false"), (fsdp(3), "unknown value"),
     (fsdp(1, sharding_strategy="HALF"), "unknown value 'HALF'"), (fsdp(1, auto_wrap_policy="BY_SIZE"), "unknown value 'BY_SIZE'"),
     (fsdp(1, cpu_ram_efficient_loading=True, sync_module_states=False), "fsdp_sync_module_states")],
)  # fmt: skip
def test_values_that_accelerate_refuses(work, text: str, fact: str) -> None:
    work.write("acc.yaml", text)
    with pytest.raises(InputError) as caught:
        work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert fact in caught.value.message and "acc.yaml" in caught.value.where


def test_trainer_reads_the_same_environment(work) -> None:
    work.write("acc.yaml", fsdp(2))
    job = work.resolve("accelerate launch --config_file acc.yaml train.py --model_name_or_path m --output_dir o --max_seq_length 8")
    assert (job.loop, job.strategy, job.precision.compute) == ("trainer", "fsdp2", "bfloat16")


def test_hybrid_shard_within_a_node(work) -> None:
    work.write("acc.yaml", fsdp(1, sharding_strategy="HYBRID_SHARD").replace("num_processes: 8", "num_processes: 8\nnum_machines: 2\n"
               "machine_rank: 0\nmain_process_ip: a\nmain_process_port: 1"))  # fmt: skip
    job = work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert job.fsdp is not None and job.fsdp.shard_group_size == 4


def hsdp(**sizes: int) -> str:
    lines = [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
    return fsdp(2) + "parallelism_config:\n" + "\n".join(lines) + "\n"


class TestParallelism:
    def test_hsdp(self, work) -> None:
        work.write("acc.yaml", hsdp(dp_replicate=2, dp_shard=4))
        job = work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
        assert job.fsdp is not None and job.fsdp.shard_group_size == 4
        assert job.origin("fsdp.shard_group_size") == Origin("acc.yaml", "parallelism_config.parallelism_config_dp_shard_size")

    def test_tensor_parallel_is_said(self, work, codes) -> None:
        work.write("acc.yaml", hsdp(dp_shard=4, tp=2))
        assert "LG320" in codes(work.resolve("accelerate launch --config_file acc.yaml" + TAIL))

    @pytest.mark.parametrize(
        ("sizes", "fact"),
        [({"dp_replicate": 2, "dp_shard": 2}, "makes 4 processes"), ({"dp_shard": 0}, "size is 0"), ({"tp": 8}, "no rank to shard over")],
    )
    def test_refusals(self, work, sizes: dict[str, int], fact: str) -> None:
        work.write("acc.yaml", hsdp(**sizes))
        with pytest.raises(InputError, match=fact):
            work.resolve("accelerate launch --config_file acc.yaml" + TAIL)


def test_not_modelled(work, codes) -> None:
    line = "accelerate launch --num_processes 2 --dynamo_backend inductor --mixed_precision fp8 --fp8_backend te"
    job = work.resolve(line + TAIL)
    assert job.compile and job.precision.autocast == "bfloat16"
    assert codes(job) == {"LG310", "LG311"}


def test_script_flag_and_literal_beat_the_launcher(work) -> None:
    work.write("train.py", 'from accelerate import Accelerator\na = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=3)\n')
    job = work.resolve("accelerate launch --num_processes 2 --mixed_precision bf16" + TAIL)
    assert (job.precision.autocast, job.gradient_accumulation_steps) == ("float16", 3)
    assert work.resolve("accelerate launch --num_processes 2" + TAIL + " --mixed_precision no").precision.autocast is None


def test_shell_environment_reaches_a_trainer_under_torchrun(work) -> None:
    line = "torchrun --nproc_per_node 2 train.py --model_name_or_path m --output_dir o --max_seq_length 8"
    job = work.resolve(line, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_MIXED_PRECISION="bf16", PYTORCH_CUDA_ALLOC_CONF="x:1")
    assert (job.strategy, job.precision.compute, job.allocator_conf) == ("fsdp2", "bfloat16", "x:1")
    assert job.origin("fsdp.version") == Origin("environment", "FSDP_VERSION")


def test_keys_of_the_other_version_are_said(work, codes) -> None:
    work.write("acc.yaml", fsdp(2, sharding_strategy="FULL_SHARD", backward_prefetch="BACKWARD_PRE"))
    job = work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert [note.origin for note in job.notes if note.code == "LG227"] == [
        "acc.yaml:fsdp_config.fsdp_sharding_strategy",
        "acc.yaml:fsdp_config.fsdp_backward_prefetch",
    ]


PLUGIN = "from accelerate import Accelerator\nplugin = %s\naccelerator = Accelerator(%s)\n"


def test_a_plugin_of_the_script_is_read(work) -> None:
    made = "FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, cpu_offload=CPUOffload(offload_params=True), "
    made += "auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['LlamaDecoderLayer'])"
    work.write("train.py", PLUGIN % (made, "fsdp_plugin=plugin"))
    job = work.resolve("torchrun --nproc_per_node 2" + TAIL)
    assert (job.strategy, job.fsdp.sharding_strategy, job.fsdp.offload_params) == ("fsdp1", "SHARD_GRAD_OP", True)
    assert job.fsdp.wrap_classes == ("LlamaDecoderLayer",) and job.origin("strategy") == Origin("train.py", "2")
    assert work.resolve("python" + TAIL).strategy == "single"  # without ranks Accelerate leaves FSDP off
    work.write("train.py", PLUGIN % (made, ""))
    assert work.resolve("torchrun --nproc_per_node 2" + TAIL).strategy == "ddp"


def test_a_callable_wrap_policy_of_a_plugin(work, codes) -> None:
    policy = "functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})"
    work.write("train.py", PLUGIN % (f"FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy={policy})", "fsdp_plugin=plugin"))
    job = work.resolve("torchrun --nproc_per_node 2" + TAIL)
    assert (job.strategy, job.fsdp.wrap_classes) == ("fsdp2", ("LlamaDecoderLayer",)) and "LG214" not in codes(job)
    work.write("train.py", PLUGIN % ("FullyShardedDataParallelPlugin(auto_wrap_policy=made())", "fsdp_plugin=plugin"))
    job = work.resolve("torchrun --nproc_per_node 2" + TAIL)
    assert job.fsdp.wrap_policy == "TRANSFORMER_BASED_WRAP" and [note.code for note in job.notes].count("LG214") == 1


def test_a_deepspeed_plugin_of_the_script(work) -> None:
    work.write("ds.json", {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"})
    for made, stage, steps in (("zero_stage=1, gradient_accumulation_steps=4", 1, 4), ("hf_ds_config='ds.json'", 3, 1)):
        work.write("train.py", PLUGIN % (f"DeepSpeedPlugin({made})", "deepspeed_plugin=plugin"))
        job = work.resolve("torchrun --nproc_per_node 2" + TAIL)
        assert (job.strategy, job.zero.stage, job.gradient_accumulation_steps) == ("zero", stage, steps)


def test_sizes_of_a_loop_under_deepspeed(work, codes) -> None:
    """The dataloader says the micro-batch, launchguard.yaml the length: neither is then a guess."""
    script = "from accelerate import Accelerator\nAccelerator()\nval = DataLoader(d, batch_size=32)\n"
    script += "train = DataLoader(d, 4, shuffle=True)\n"
    work.write("train.py", script)
    line = "accelerate launch --use_deepspeed --num_processes 2 train.py --model m"
    work.write("launchguard.yaml", "seq_len: 64\n")
    job = work.resolve(line)
    assert (job.micro_batch_size, job.seq_len) == (4, 64) and not {"LG210", "LG211"} & codes(job)
    work.write("launchguard.yaml", "seq_len: 64\nmicro_batch_size: 3\n")
    job = work.resolve(line)
    assert job.micro_batch_size == 3 and not {"LG210", "LG211"} & codes(job)
    work.write("launchguard.yaml", "seq_len: 64\n")
    work.write("train.py", script.replace("4, shuffle", "batch_size=n, shuffle"))
    assert "LG211" in codes(work.resolve(line))


@pytest.mark.parametrize(
    "content, text",
    [
        (fsdp(1, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params="many"), "not a whole number"),
        (fsdp(1, sharding_strategy="FULLSHARD"), "unknown value 'FULLSHARD'"),
        (fsdp(1, offload_params="ja"), "neither true nor false"),
        (fsdp(3), "unknown value '3'"),
        ("distributed_type: MULTI_GPU\nnum_processes: eight\n", "num_processes is 'eight'"),
    ],
)
def test_what_accelerate_refuses(work, content: str, text: str) -> None:
    work.write("acc.yaml", content)
    with pytest.raises(InputError, match=text) as caught:
        work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert caught.value.code == "LG250"


def test_an_eight_bit_optimizer(work, codes) -> None:
    work.write("train.py", "import bitsandbytes as bnb\nfrom accelerate import Accelerator\nAccelerator()\nbnb.optim.AdamW8bit(p)\n")
    work.write("acc.yaml", fsdp(1, auto_wrap_policy="TRANSFORMER_BASED_WRAP"))
    job = work.resolve("accelerate launch --config_file acc.yaml" + TAIL)
    assert job.optimizer.name == "adamw_8bit" and "LG264" in codes(job)
    line = "accelerate launch --use_deepspeed --num_processes 2 --zero_stage 2 --offload_optimizer_device %s" + TAIL
    job = work.resolve(line % "cpu")
    assert (job.optimizer.name, job.optimizer.implementation) == ("adamw", "cpu") and "LG264" in codes(job)
    job = work.resolve(line % "none")
    assert job.optimizer.name == "adamw_8bit" and "LG264" not in codes(job)
