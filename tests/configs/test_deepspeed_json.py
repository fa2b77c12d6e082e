"""DeepSpeed configs under the three programs that complete them, and what each refuses."""

from __future__ import annotations

from typing import Any

import pytest

from launchguard.errors import InputError
from launchguard.job import Origin, Precision

TRAINER = "torchrun --nproc_per_node 4 train.py --model_name_or_path m --output_dir o --max_seq_length 64 --bf16 --deepspeed ds.json"
RAW = "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds.json --model m --seq_len 64"
AUTO = {
    "bf16": {"enabled": "auto"}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip


def ds(**changes: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, **changes}


class TestTrainer:
    def test_auto(self, work) -> None:
        work.write("ds.json", AUTO)
        job = work.resolve(TRAINER + " --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --max_grad_norm 0.5")
        assert job.strategy == "zero" and job.zero is not None
        assert (job.zero.stage, job.zero.dtype, job.zero.zero_init) == (3, "bfloat16", True)
        assert (job.zero.reduce_bucket_size, job.zero.stage3_prefetch_bucket_size) == (64 * 64, int(0.9 * 64 * 64))
        assert job.zero.stage3_param_persistence_threshold == 640
        assert (job.micro_batch_size, job.gradient_accumulation_steps, job.max_grad_norm) == (2, 3, 0.5)
        assert job.origin("zero.stage") == Origin("ds.json", "zero_optimization.stage")
        assert job.origin("zero.reduce_bucket_size") == Origin("ds.json", "zero_optimization.reduce_bucket_size")
        assert job.origin("zero.dtype") == Origin("command line", "--bf16")
        assert job.precision == Precision("bfloat16", "bfloat16", "bfloat16", None, "bfloat16", False)
        assert job.zero.overlap_comm and job.optimizer.implementation == "fused"

    def test_stage3_autos_of_lower_stages_are_dropped(self, work) -> None:
        work.write("ds.json", {**AUTO, "zero_optimization": {**AUTO["zero_optimization"], "stage": 2}})
        job = work.resolve(TRAINER)
        assert job.zero is not None
        assert (job.zero.reduce_bucket_size, job.zero.stage3_prefetch_bucket_size) == (4096, 50_000_000)
        assert not job.zero.overlap_comm and not job.zero.zero_init

    def test_no_hidden_size(self, work) -> None:
        work.write("ds.json", AUTO)
        work.write("m/config.json", {"model_type": "x"})
        with pytest.raises(InputError, match="no hidden_size"):
            work.resolve(TRAINER)

    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu"),
            ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
            ({"train_batch_size": 31}, "train_batch_size"),
            ({"bf16": {"enabled": False}}, "bf16.enabled"),
            ({"gradient_clipping": 0.1}, "gradient_clipping"),
            ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, "optimizer.params.lr"),
        ],
    )
    def test_must_match(self, work, changes: dict[str, Any], key: str) -> None:
        work.write("ds.json", {**AUTO, **changes})
        with pytest.raises(InputError) as caught:
            work.resolve(TRAINER)
        assert caught.value.where == f"ds.json:{key}" and "auto" in caught.value.help

    def test_inline_json_and_optimizer_block(self, work) -> None:
        argv = TRAINER.split()[:-1] + ['{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"torch_adam": true}}}']
        job = work.resolve(argv)
        assert job.zero is not None and job.zero.stage == 1
        assert (job.optimizer.name, job.optimizer.implementation) == ("adamw", "foreach")

    def test_offload_makes_the_client_optimizer_a_cpu_one(self, work) -> None:
        work.write("ds.json", {**AUTO, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}})
        job = work.resolve(TRAINER)
        assert job.zero is not None and job.zero.offload_optimizer == "cpu" and not job.zero.offload_pin_memory
        assert job.optimizer.implementation == "cpu"

    def test_no_zero_section(self, work) -> None:
        work.write("ds.json", {"train_batch_size": "auto"})
        with pytest.raises(InputError, match="no zero_optimization"):
            work.resolve(TRAINER)

    def test_fp16_of_the_json_against_bf16(self, work) -> None:
        work.write("ds.json", {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}})
        with pytest.raises(InputError, match="fp16"):
            work.resolve(TRAINER)


class TestRaw:
    @pytest.mark.parametrize(
        ("triple", "micro", "steps"),
        [({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, 2), ({"train_batch_size": 64}, 8, 1),
         ({"train_micro_batch_size_per_gpu": 3}, 3, 1), ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 2, 4),
         ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, 3, 4)],
    )  # fmt: skip
    def test_two_give_the_third(self, work, triple: dict[str, int], micro: int, steps: int) -> None:
        work.write("ds.json", {"zero_optimization": {"stage": 2}, **triple})
        job = work.resolve(RAW)
        assert (job.loop, job.micro_batch_size, job.gradient_accumulation_steps) == ("deepspeed", micro, steps)

    @pytest.mark.parametrize(
        ("changes", "fact"),
        [
            ({"train_batch_size": 60}, "train_batch_size 60 is not"),
            ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": None}, "is not"),
            ({"train_micro_batch_size_per_gpu": 0}, "not a positive number"),
            ({"train_micro_batch_size_per_gpu": "auto"}, '"auto"'),
            ({"train_micro_batch_size_per_gpu": None}, "neither train_batch_size"),
        ],
    )
    def test_contradictions(self, work, changes: dict[str, Any], fact: str) -> None:
        work.write("ds.json", ds(**changes))
        with pytest.raises(InputError) as caught:
            work.resolve(RAW)
        assert fact in caught.value.message and "ds.json" in caught.value.where and caught.value.help

    def test_sections_and_autos_inside_them(self, work) -> None:
        work.write("ds.json", ds(fp16={"enabled": True}, communication_data_type="fp32", data_types={"grad_accum_dtype": "fp32"},
                                 optimizer={"type": "Lion", "params": {}}, gradient_clipping=0,
                                 zero_optimization={"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": 2e8}))  # fmt: skip
        job = work.resolve(RAW)
        assert job.zero is not None
        assert (job.zero.dtype, job.zero.communication_data_type, job.zero.grad_accum_dtype) == ("float16", "float32", "float32")
        assert (job.zero.reduce_bucket_size, job.zero.allgather_bucket_size) == (500_000_000, 200_000_000)
        assert isinstance(job.zero.allgather_bucket_size, int)
        assert (job.optimizer.name, job.optimizer.implementation, job.max_grad_norm) == ("lion", "deepspeed_fused", None)
        assert job.outputs_alive_in_backward and not job.zero.zero_init

    def test_notes(self, work) -> None:
        work.write("ds.json", ds(activation_checkpointing={"partition_activations": True}, typo=1, compile={"deepcompile": True},
                                 zero_optimization={"stage": 2, "allgather_bucket_size": 1, "offload_param": {"device": "cpu"},
                                                    "zero_quantized_weights": True}))  # fmt: skip
        job = work.resolve(RAW)
        assert sorted(note.code for note in job.notes) == ["LG220", "LG220", "LG221", "LG222", "LG320", "LG320"]
        assert job.zero is not None and job.zero.offload_param == "none"

    @pytest.mark.parametrize(
        ("text", "where"),
        [('{\n "a": 1,\n}', "ds.json:3:1"), ("[1]", "ds.json"), ('{"a": 1, "a": 2}', "ds.json"), ("", "ds.json:1:1")],
    )
    def test_malformed(self, work, text: str, where: str) -> None:
        work.write("ds.json", text)
        with pytest.raises(InputError) as caught:
            work.resolve(TRAINER)
        assert caught.value.where == where

    def test_comments_as_deepspeed_reads_them(self, work) -> None:
        pytest.importorskip("hjson")
        work.write("ds.json", '{\n // a comment\n "train_micro_batch_size_per_gpu": 5\n}')
        assert work.resolve(RAW).micro_batch_size == 5

    def test_missing(self, work) -> None:
        with pytest.raises(InputError, match="ds.json does not exist"):
            work.resolve(RAW)


class TestAccelerate:
    def test_inline(self, work) -> None:
        line = "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4 --mixed_precision bf16 train.py --model m --batch_size 2"
        job = work.resolve(line + " --seq_len 32 --gradient_accumulation_steps 2")
        assert job.loop == "accelerate" and job.zero is not None
        assert (job.zero.stage, job.zero.dtype, job.zero.reduce_bucket_size) == (3, "bfloat16", 500_000_000)
        assert (job.micro_batch_size, job.gradient_accumulation_steps, job.max_grad_norm) == (2, 2, 1.0)
        assert job.origin("zero.stage") == Origin("command line", "--zero_stage")
        assert job.precision.autocast is None

    def test_yaml_with_json(self, work) -> None:
        work.write("ds.json", AUTO)
        work.write(
            "acc.yaml",
            "distributed_type: DEEPSPEED\nnum_processes: 4\n"
            "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n",
        )
        line = "accelerate launch --config_file acc.yaml train.py --model m --batch_size 2 --seq_len 32"
        job = work.resolve(line)
        assert job.zero is not None and job.zero.stage == 3 and job.zero.zero_init  # whatever zero3_init_flag says
        assert job.zero.dtype == "float32"  # mixed precision is "no", and "auto" follows it
        assert [note.origin for note in job.notes if note.code == "LG239"] == ["acc.yaml:deepspeed_config.zero3_init_flag"]
        work.write(
            "acc.yaml",
            "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
        )
        with pytest.raises(InputError, match="mixed_precision cannot stand"):
            work.resolve(line)

    def test_explicit_total_of_another_world(self, work) -> None:
        work.write("ds.json", {**AUTO, "train_batch_size": 100})
        line = "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 4 train.py --model m --batch_size 2"
        with pytest.raises(InputError, match="train_batch_size 100 is not"):
            work.resolve(line)


@pytest.mark.parametrize(
    ("changes", "where", "reason"),
    [({"amp": {"enabled": True}}, "ds.json:amp", "removed"),
     ({"zero_optimization": {"stage": 2, "bucket": 1}}, "ds.json:zero_optimization.bucket", "extra inputs"),
     ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "ds.json:zero_optimization.mics_shard_size", "removed"),
     ({"zero_optimization": {"stage": 7}}, "ds.json:zero_optimization.stage", "")],
)  # fmt: skip
def test_the_installed_deepspeed_is_asked(work, changes: dict[str, Any], where: str, reason: str) -> None:
    pytest.importorskip("deepspeed")
    work.write("ds.json", ds(**changes))
    with pytest.raises(InputError) as caught:
        work.resolve(RAW, {"validate": True})
    assert caught.value.where == where and reason in caught.value.message


def test_validation_gives_the_installed_defaults(work, capfd) -> None:
    pytest.importorskip("deepspeed")
    work.write("ds.json", ds())
    asked, unasked = work.resolve(RAW, {"validate": True}), work.resolve(RAW)
    assert asked.zero == unasked.zero
    assert capfd.readouterr().out == ""


def test_every_mismatch_at_once(work) -> None:
    work.write("ds.json", {**AUTO, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})
    with pytest.raises(InputError) as caught:
        work.resolve(TRAINER)
    assert caught.value.where == "ds.json:train_micro_batch_size_per_gpu, ds.json:gradient_accumulation_steps"


@pytest.mark.parametrize("early", [True, False])
def test_a_model_loaded_before_the_arguments_is_not_partitioned(work, codes, early: bool) -> None:
    lines = ['    model = AutoModelForCausalLM.from_pretrained("m")', "    args, = parser.parse_args_into_dataclasses()"]
    work.write("train.py", "def main():\n" + "\n".join(lines if early else lines[::-1]) + "\n    Trainer(model, args)\n")
    work.write("ds.json", AUTO)
    job = work.resolve(TRAINER)
    assert job.zero is not None and job.zero.zero_init != early
    assert ("LG228" in codes(job)) == early


def test_a_quantised_model_is_loaded_whole(work, codes) -> None:
    work.write("ds.json", AUTO)
    job = work.resolve(TRAINER.replace("train.py", "sft.py") + " --use_peft --load_in_4bit")
    assert job.zero is not None and not job.zero.zero_init and "LG229" in codes(job)


def test_batch_search_is_refused_with_stage_3(work) -> None:
    work.write("ds.json", AUTO)
    with pytest.raises(InputError, match="auto_find_batch_size"):
        work.resolve(TRAINER + " --auto_find_batch_size")


def test_a_config_made_in_the_script(work, codes) -> None:
    line = "deepspeed --num_gpus 8 main.py --model_name_or_path m --per_device_train_batch_size 4 --max_seq_len 64 --deepspeed"
    job = work.resolve(line + " --zero_stage 3 --dtype bf16 --offload --gradient_accumulation_steps 2")
    assert job.loop == "deepspeed" and job.zero is not None and "LG213" in codes(job)
    assert (job.zero.stage, job.zero.dtype, job.zero.offload_optimizer) == (3, "bfloat16", "cpu")
    assert (job.micro_batch_size, job.gradient_accumulation_steps) == (4, 2)


def test_a_config_written_in_the_script(work) -> None:
    work.write("train.py", 'CONFIG = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}}\n'
               "engine, *_ = deepspeed.initialize(model=model, config=CONFIG)\n")  # fmt: skip
    job = work.resolve("torchrun --nproc_per_node 2 train.py --model m --seq_len 8")
    assert job.loop == "deepspeed" and job.zero is not None and job.zero.stage == 1
    assert str(job.origin("zero.stage")) == "train.py:2:zero_optimization.stage"


@pytest.mark.parametrize(
    "params, arguments, refused",
    [
        ({"warmup_num_steps": 500}, "", True),
        ({"warmup_num_steps": 500}, "--warmup_steps 500", False),
        ({"warmup_num_steps": 1}, "", False),
        ({"warmup_max_lr": 1e-3}, "", True),
        ({"total_num_steps": 10}, "--max_steps 20", True),
        ({"total_num_steps": 10}, "", False),
        ({"warmup_num_steps": 5}, "--warmup_steps 0.1 --max_steps 50", False),
        ({"warmup_num_steps": 6}, "--warmup_steps 0.1 --max_steps 50", True),
    ],
)
def test_scheduler_values_are_compared_with_the_arguments(work, params: dict, arguments: str, refused: bool) -> None:
    work.write("ds.json", {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupDecayLR", "params": params}})
    line = f"torchrun --nproc_per_node 2 t.py --model_name_or_path m --output_dir o --max_length 8 --deepspeed ds.json {arguments}"
    if not refused:
        assert work.resolve(line).strategy == "zero"
        return
    with pytest.raises(InputError) as caught:
        work.resolve(line)
    assert caught.value.code == "LG253" and next(iter(params)) in caught.value.message


def test_a_scheduler_that_deepspeed_does_not_know(work) -> None:
    work.write("ds.json", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "scheduler": {"type": "Cosine"}})
    with pytest.raises(InputError, match="does not recognize LR scheduler Cosine") as caught:
        work.resolve("deepspeed --num_gpus 2 t.py --model m --seq_len 8 --deepspeed_config ds.json")
    assert caught.value.code == "LG251"


@pytest.mark.parametrize(
    "content, text",
    [
        ('{"zero_optimization": {"stage": 2', "not valid JSON"),
        ({"zero_optimization": True, "train_micro_batch_size_per_gpu": 1}, "not a section"),
        ({"zero_optimization": {}, "train_micro_batch_size_per_gpu": 0}, "not a positive number"),
        ({"zero_optimization": {}, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adamm"}}, "have no optimizer Adamm"),
        ({"zero_optimization": {}, "train_micro_batch_size_per_gpu": 1, "data_types": {"grad_accum_dtype": "int3"}}, "is 'int3'"),
    ],
)
def test_what_deepspeed_refuses_has_its_code(work, content: Any, text: str) -> None:
    work.write("ds.json", content)
    with pytest.raises(InputError, match=text) as caught:
        work.resolve("deepspeed --num_gpus 2 t.py --model m --seq_len 8 --deepspeed_config ds.json")
    assert caught.value.code == "LG251"


def test_a_compressed_optimizer_is_predicted_as_the_plain_one(work, codes) -> None:
    work.write("ds.json", {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "OneBitAdam"}})
    job = work.resolve("deepspeed --num_gpus 2 t.py --model m --seq_len 8 --deepspeed_config ds.json")
    assert job.optimizer.name == "adamw" and "LG310" in codes(job)
