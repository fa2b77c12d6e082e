"""Jobs whose loop is transformers.Trainer or TRL: arguments, defaults, precision, FSDP, checkpointing, sizes."""

from __future__ import annotations

import pytest

from launchguard.errors import InputError
from launchguard.installed import version_of
from launchguard.job import Origin, Precision

TRAINER = "torchrun --nproc_per_node 4 train.py --model_name_or_path m --output_dir out --max_seq_length 64"


def test_defaults_are_the_installed_library_s(work) -> None:
    job = work.resolve(TRAINER)
    assert (job.loop, job.strategy, job.micro_batch_size, job.gradient_accumulation_steps, job.seq_len) == ("trainer", "ddp", 8, 1, 64)
    assert job.max_grad_norm == 1.0
    assert str(job.origin("micro_batch_size")).startswith("default of transformers ")
    assert job.origin("seq_len") == Origin("command line", "--max_seq_length")
    assert (job.optimizer.name, job.optimizer.implementation) == ("adamw", "fused")
    assert job.ddp is not None and job.ddp.find_unused_parameters
    assert not job.outputs_alive_in_backward
    assert job.precision == Precision(load="bfloat16", storage="bfloat16", compute="bfloat16", reduce="bfloat16")


def test_bf16_is_autocast_under_ddp(work) -> None:
    job = work.resolve(TRAINER + " --bf16 --gradient_checkpointing --per_device_train_batch_size=2")
    assert job.precision == Precision("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16", True)
    assert job.activation_checkpointing.enabled and not job.activation_checkpointing.use_reentrant
    assert job.ddp is not None and not job.ddp.find_unused_parameters
    assert job.micro_batch_size == 2


def test_bf16_and_fp16_exclude_each_other(work) -> None:
    with pytest.raises(InputError, match="both on"):
        work.resolve(TRAINER + " --bf16 --fp16")


@pytest.mark.parametrize(
    ("name", "profile", "implementation"),
    [
        ("adamw_torch", "adamw", "foreach"),
        ("adamw_torch_fused", "adamw", "fused"),
        ("adamw_bnb_8bit", "adamw_8bit", "fused"),
        ("paged_adamw_8bit", "paged_adamw_8bit", "fused"),
        ("adafactor", "adafactor", "for_loop"),
        ("galore_adamw", "adamw", "foreach"),
    ],
)
def test_optim(work, name: str, profile: str, implementation: str) -> None:
    job = work.resolve(TRAINER + f" --optim {name}")
    assert (job.optimizer.name, job.optimizer.implementation) == (profile, implementation)


def test_optim_args(work) -> None:
    assert work.resolve(TRAINER + " --optim sgd --optim_args momentum=0.9,foo=1").optimizer.params == {"momentum": 0.9}


def test_checkpointing_kwargs(work) -> None:
    argv = [*TRAINER.split(), "--gradient_checkpointing", "True", "--gradient_checkpointing_kwargs", '{"use_reentrant": true, "x": 1}']
    job = work.resolve(argv)
    assert job.activation_checkpointing.use_reentrant
    assert [note.code for note in job.notes] == ["LG310"]
    with pytest.raises(InputError, match="not valid JSON"):
        work.resolve([*argv[:-1], "{use_reentrant: false}"])


def test_partial_checkpointing(work) -> None:
    argv = [*TRAINER.split(), "--activation_checkpointing", "--activation_checkpointing_kwargs", '{"every_n_layers": 2, "offload": true}']
    checkpointing = work.resolve(argv).activation_checkpointing
    assert (checkpointing.enabled, checkpointing.every_n_layers, checkpointing.offload) == (True, 2, True)
    with pytest.raises(InputError, match="every_n_layers"):
        work.resolve([*argv[:-1], '{"every_n_layers": 0}'])


def test_liger_kernels_are_simulated_where_they_are_installed(work, codes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launchguard.configs.training_args.version_of", lambda name: "0.8.5" if name == "liger-kernel" else version_of(name)
    )
    job = work.resolve([*TRAINER.split(), "--use_liger_kernel", "--liger_kernel_config", '{"rope": false}'])
    assert job.model.use_liger_kernel and job.model.liger_kernel_config == {"rope": False}
    assert "LG312" not in codes(job)


def test_missing_length_is_said(work, codes) -> None:
    job = work.resolve("python train.py --model_name_or_path m --output_dir out")
    assert job.seq_len == 512
    assert codes(job) == {"LG210"}


def test_model_length_does_not_change_a_stated_one(work) -> None:
    assert work.resolve(TRAINER.replace("64", "4096")).seq_len == 4096


@pytest.mark.parametrize(("dtype", "load"), [("auto", "bfloat16"), ("float32", "float32"), ("bf16", "bfloat16")])
def test_load_dtype(work, dtype: str, load: str) -> None:
    assert work.resolve(TRAINER + f" --torch_dtype {dtype}").precision.load == load


def test_unknown_dtype(work) -> None:
    with pytest.raises(InputError, match="unknown dtype 'bfloat15'"):
        work.resolve(TRAINER + " --torch_dtype bfloat15")


@pytest.mark.parametrize("flag", ["--per_device_train_batch_size four", "--bf16 maybe", "--gradient_accumulation_steps 1.5"])
def test_wrong_types_are_refused(work, flag: str) -> None:
    with pytest.raises(InputError) as caught:
        work.resolve(TRAINER + " " + flag)
    assert flag.split()[0] in caught.value.where


def test_not_modelled_settings_are_said(work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launchguard.configs.training_args.version_of", lambda name: None if name == "liger-kernel" else version_of(name))
    job = work.resolve(TRAINER + " --torch_compile --use_liger_kernel --neftune_noise_alpha 5 --auto_find_batch_size")
    assert job.compile and job.model.use_liger_kernel
    assert sorted(note.code for note in job.notes) == ["LG310", "LG310", "LG311", "LG312"]


class TestFsdp:
    def test_trainer_defaults_to_version_2(self, work) -> None:
        job = work.resolve([*TRAINER.split(), "--bf16", "--fsdp", "full_shard auto_wrap"])
        assert job.strategy == "fsdp2" and job.fsdp is not None
        assert (job.fsdp.version, job.fsdp.wrap_policy, job.fsdp.reshard_after_forward) == (2, "TRANSFORMER_BASED_WRAP", True)
        assert not job.fsdp.cpu_ram_efficient_loading
        assert job.precision == Precision("bfloat16", "float32", "bfloat16", None, "bfloat16", False)

    def test_version_1(self, work) -> None:
        work.write("fsdp.json", {"fsdp_version": 1, "transformer_layer_cls_to_wrap": ["A", "B"], "backward_prefetch": "backward_pre"})
        job = work.resolve([*TRAINER.split(), "--bf16", "--fsdp", "hybrid_shard offload", "--fsdp_config", "fsdp.json"])
        assert job.strategy == "fsdp1" and job.fsdp is not None
        assert job.fsdp.sharding_strategy == "HYBRID_SHARD" and job.fsdp.offload_params
        assert job.fsdp.wrap_classes == ("A", "B") and job.fsdp.backward_prefetch == "BACKWARD_PRE"
        assert job.fsdp.use_orig_params and job.fsdp.sync_module_states and job.fsdp.shard_group_size == 4
        assert job.precision == Precision("bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16", True)
        assert str(job.origin("fsdp.wrap_classes")) == "fsdp.json:transformer_layer_cls_to_wrap"

    @pytest.mark.parametrize(
        ("fsdp", "config", "fact"),
        [("hybrid_shard", "{}", "FSDP1 only"), ("full_shrad", "{}", "unknown --fsdp option"), ("full_shard", '{"version": 3}', "version 3"),
         ("full_shard", '{"version": "x"}', "not a number"), ("full_shard", "missing.json", "does not exist"),
         ("full_shard", '{"reshard_after_forward": "FULL_SHARD"}', "neither true nor false"),
         ("full_shard", '{"auto_wrap_policy": "LAYERS"}', "unknown value 'LAYERS'"), ("full_shard", '{"version": 1', "not valid JSON")],
    )  # fmt: skip
    def test_refusals(self, work, fsdp: str, config: str, fact: str) -> None:
        with pytest.raises(InputError) as caught:
            work.resolve([*TRAINER.split(), "--fsdp", fsdp, "--fsdp_config", config])
        assert fact in caught.value.message and caught.value.help and caught.value.where

    def test_checkpointing_twice(self, work) -> None:
        argv = [*TRAINER.split(), "--fsdp", "full_shard", "--gradient_checkpointing", "--fsdp_config", '{"activation_checkpointing": true}']
        with pytest.raises(InputError, match="twice"):
            work.resolve(argv)
        assert work.resolve([word for word in argv if word != "--gradient_checkpointing"]).activation_checkpointing.via == "fsdp"

    def test_config_without_fsdp_is_inert(self, work, codes) -> None:
        job = work.resolve([*TRAINER.split(), "--fsdp_config", "{}", "--fsdp_config", '{"version": 1}'])
        assert job.fsdp is None and "LG223" in codes(job)


class TestTrl:
    LINE = "torchrun --nproc_per_node 2 sft.py --model_name_or_path m --output_dir out"

    def test_defaults(self, work) -> None:
        job = work.resolve(self.LINE)
        assert (job.loop, job.seq_len, job.precision.load, job.precision.autocast) == ("sft", 1024, "float32", "bfloat16")
        assert job.activation_checkpointing.enabled
        assert str(job.origin("seq_len")).startswith("default of trl ")
        assert str(job.origin("activation_checkpointing.enabled")).startswith("default of trl ")

    def test_fp16_switches_bf16_off(self, work) -> None:
        assert work.resolve(self.LINE + " --fp16").precision.autocast == "float16"

    def test_no_flag(self, work) -> None:
        assert not work.resolve(self.LINE + " --no_gradient_checkpointing").activation_checkpointing.enabled

    def test_config_file_under_flags(self, work) -> None:
        work.write("sft.yaml", "model_name_or_path: m\nmax_length: 256\nper_device_train_batch_size: 3\nlearning_rate: 1e-4\nbf16: true\n")
        job = work.resolve("torchrun --nproc_per_node 2 sft.py --config sft.yaml --max_length 128")
        assert (job.seq_len, job.micro_batch_size) == (128, 3)
        assert job.origin("micro_batch_size") == Origin("sft.yaml", "per_device_train_batch_size")

    def test_lora_defaults_of_model_config(self, work) -> None:
        job = work.resolve(self.LINE + " --use_peft --lora_target_modules q_proj v_proj --load_in_4bit --dtype bfloat16")
        assert job.lora is not None and job.quantization is not None
        assert (job.lora.r, job.lora.lora_alpha, job.lora.target_modules) == (16, 32, ("q_proj", "v_proj"))
        assert not job.lora.autocast_adapter_dtype
        assert (job.quantization.method, job.quantization.compute_dtype, job.quantization.prepare_kbit) == ("nf4", "bfloat16", False)

    def test_peft_names_without_the_switch_do_nothing(self, work) -> None:
        assert work.resolve(self.LINE + " --lora_r 8").lora is None

    def test_four_and_eight_bits(self, work) -> None:
        with pytest.raises(InputError, match="both on"):
            work.resolve(self.LINE + " --load_in_4bit --load_in_8bit")

    def test_dpo(self, work) -> None:
        assert work.resolve(self.LINE.replace("sft.py", "scripts/dpo.py")).loop == "dpo"


def test_llama_factory_names(work) -> None:
    work.write("lf.yaml", "model_name_or_path: m\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\ncutoff_len: 99\n"
               "per_device_train_batch_size: 1\nquantization_bit: 4\noutput_dir: o\nbf16: true\n")  # fmt: skip
    job = work.resolve("torchrun --nproc_per_node 2 src/train.py lf.yaml")
    assert job.lora is not None and job.quantization is not None
    assert (job.lora.r, job.lora.target_modules, job.seq_len, job.quantization.method) == (8, "all-linear", 99, "nf4")


class TestModel:
    def test_none_given(self, work) -> None:
        with pytest.raises(InputError, match="names no model"):
            work.resolve("python train.py --output_dir o")

    def test_missing_directory(self, work) -> None:
        with pytest.raises(InputError, match="no model directory ./n"):
            work.resolve("python train.py --output_dir o --model_name_or_path ./n")

    def test_hub_id_offline(self, work) -> None:
        with pytest.raises(InputError) as caught:
            work.resolve("python train.py --output_dir o --model_name_or_path org/name")
        assert "org/name" in caught.value.message and "--model DIR" in caught.value.help
        assert caught.value.where == "command line:--model_name_or_path"

    def test_hub_id_in_the_cache(self, work) -> None:
        folder = "hf/hub/models--org--name"
        work.write(f"{folder}/refs/main", "abc\n")
        work.write(f"{folder}/snapshots/abc/config.json", {"hidden_size": 8, "n_positions": 77})
        job = work.resolve("python train.py --output_dir o --model_name_or_path org/name", HF_HOME=str(work.path / "hf"))
        assert job.seq_len == 77

    def test_malformed(self, work) -> None:
        work.write("bad/config.json", "{\n 'a': 1}")
        with pytest.raises(InputError) as caught:
            work.resolve("python train.py --output_dir o --model_name_or_path bad")
        assert caught.value.where == "bad/config.json:2:2"

    def test_no_config(self, work) -> None:
        (work.path / "empty").mkdir()
        with pytest.raises(InputError, match="empty/config.json"):
            work.resolve("python train.py --output_dir o --model_name_or_path empty")


def test_fsdp_config_keys_that_nothing_reads(work) -> None:
    config = '{"sharding_strategy": "FULL_SHARD", "use_orig_params": true}'
    job = work.resolve([*TRAINER.split(), "--fsdp", "full_shard", "--fsdp_config", config])
    assert sorted(note.code for note in job.notes) == ["LG225", "LG227", "LG230", "LG230", "LG232"]


def test_hub_without_an_address(work, monkeypatch: pytest.MonkeyPatch) -> None:
    from launchguard.configs import model_config

    monkeypatch.setattr(model_config, "_resolves", lambda env: False)
    with pytest.raises(InputError, match="no such host"):
        work.resolve("python train.py --output_dir o --model_name_or_path org/name", HF_HUB_OFFLINE="0")
