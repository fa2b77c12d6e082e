"""The script itself: its arguments, and what its source text says without being run."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchguard.configs import _installed, script_args
from launchguard.job import Origin, Setting

FIELDS = _installed.dataclass_fields("SFTConfig")
names = st.text(string.ascii_lowercase + "_", min_size=1, max_size=12).filter(lambda name: name[0] != "_" and name not in FIELDS)
words = st.text(string.ascii_letters + "/._", min_size=1, max_size=10).filter(
    lambda word: word.lower() not in ("true", "false", "none", "null") and not word.lower().startswith(("inf", "nan"))
)


def values(tokens: list[str]) -> dict[str, object]:
    return {name: setting.value for name, setting in script_args.parse(tokens, FIELDS).items()}


@given(st.dictionaries(names.filter(lambda name: not name.startswith("no_")), st.one_of(st.integers(0, 10**9), st.booleans(), words)))
def test_unknown_arguments_keep_name_and_value(arguments: dict[str, object]) -> None:
    separate = [token for name, value in arguments.items() for token in (f"--{name}", str(value))]
    joined = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]

    def plain(parsed: dict[str, object]) -> dict[str, str]:
        return {name: str(value) for name, value in parsed.items()}

    def normal(value: object) -> str:
        try:
            return str(value) if isinstance(value, (bool, int)) else str(script_args._loose(str(value)))
        except ValueError:
            return str(value)

    expected = {name: normal(value) for name, value in arguments.items()}
    assert plain(values(separate)) == expected
    assert plain(values(joined)) == expected


@given(st.integers(1, 512), st.floats(0, 10, allow_nan=False), st.booleans())
def test_known_arguments_have_their_field_s_type(batch: int, norm: float, bf16: bool) -> None:
    found = values(["--per_device_train_batch_size", str(batch), f"--max-grad-norm={norm}", "--bf16", str(bf16), "--packing"])
    assert found == {"per_device_train_batch_size": batch, "max_grad_norm": norm, "bf16": bf16, "packing": True}


@given(st.lists(st.text(max_size=8), max_size=8))
def test_any_tokens_are_read_without_a_crash(tokens: list[str]) -> None:
    script_args.parse(tokens, {})
    script_args.config_file_of(tokens)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [("--bf16 --fp16 False", {"bf16": True, "fp16": False}), ("--no_gradient_checkpointing", {"gradient_checkpointing": False}),
     ("--lora_target_modules a b --x", {"lora_target_modules": ["a", "b"], "x": True}), ("--x -1 --y -.5", {"x": -1, "y": -0.5}),
     ("learning_rate=1e-4 +model.name=m", {"learning_rate": 1e-4, "model.name": "m"}), ("--deepspeed ds.json", {"deepspeed": "ds.json"}),
     ("--report_to a b", {"report_to": ["a", "b"]}), ("pos --x 1", {"x": 1}), ("--x 1 --x 2", {"x": 2})],
)  # fmt: skip
def test_forms(tokens: str, found: dict[str, object]) -> None:
    assert values(tokens.split()) == found


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        ("--config a.yaml", "a.yaml"),
        ("a.json", "a.json"),
        ("a.yaml --x 1", "a.yaml"),
        ("--x a.yaml", None),
        ("--config cls", None),
        ("", None),
    ],
)
def test_config_file(tokens: str, name: str | None) -> None:
    assert script_args.config_file_of(tokens.split()) == name


# ---------------------------------------------------------------- source text
def test_fsdp2_script(work, codes) -> None:
    work.write(
        "train.py",
        """
import argparse, torch
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=3)
p.add_argument("--seq-len", type=int, default=128)
model = AutoModelForSequenceClassification.from_pretrained("m", torch_dtype=torch.float32)
mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=mp, reshard_after_forward=False)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, amsgrad=True)
""",
    )
    job = work.resolve("torchrun --nproc_per_node 4 train.py --batch-size 5")
    assert (job.loop, job.strategy, job.micro_batch_size, job.seq_len) == ("torch", "fsdp2", 5, 128)
    assert job.origin("seq_len") == Origin("train.py", "6") and job.origin("strategy") == Origin("train.py", "10")
    assert job.model.task == "AutoModelForSequenceClassification" and job.origin("model.source") == Origin("train.py", "7")
    assert (job.precision.storage, job.precision.compute, job.precision.reduce) == ("float32", "bfloat16", "float32")
    assert job.fsdp is not None and not job.fsdp.reshard_after_forward and not job.fsdp.accelerate_grouping
    assert (job.optimizer.name, job.optimizer.implementation, job.optimizer.params) == ("adamw", "fused", {"amsgrad": True})
    assert codes(job) == {"LG214"}


def test_fsdp1_script(work) -> None:
    work.write(
        "train.py",
        """
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
model = FSDP(AutoModelForCausalLM.from_pretrained("m"), auto_wrap_policy=policy, use_orig_params=True)
""",
    )
    job = work.resolve("torchrun --nproc_per_node 4 train.py")
    assert job.strategy == "fsdp1" and job.fsdp is not None
    assert (job.fsdp.wrap_policy, job.fsdp.wrap_classes) == ("TRANSFORMER_BASED_WRAP", ("LlamaDecoderLayer",))
    assert job.fsdp.use_orig_params and job.fsdp.backward_prefetch == "BACKWARD_PRE"


def test_ddp_script(work) -> None:
    work.write(
        "train.py",
        'm = AutoModel.from_pretrained("m")\nm = DDP(m, gradient_as_bucket_view=True)\n'
        'with torch.autocast("cuda", dtype=torch.bfloat16): m()\n',
    )
    job = work.resolve("torchrun --nproc_per_node 4 train.py --batch_size 1 --seq_len 8")
    assert job.strategy == "ddp" and job.ddp is not None and job.ddp.gradient_as_bucket_view
    assert job.precision.autocast == "bfloat16" and not job.precision.float32_outputs


@pytest.mark.parametrize("arguments", ['"cuda", torch.bfloat16', "True, torch.bfloat16", "dtype=torch.bfloat16"])
def test_autocast_dtype(work, arguments: str) -> None:
    work.write("train.py", f"with torch.autocast({arguments}):\n    loss = model(x)\nloss.backward()\n")
    assert work.resolve("python train.py --model m --batch_size 1 --seq_len 8").precision.autocast == "bfloat16"


def test_sft_script_with_everything_in_code(work) -> None:
    work.write(
        "train.py",
        """
from trl import SFTTrainer, SFTConfig
BATCH = 2
args = SFTConfig(output_dir="x", per_device_train_batch_size=BATCH, max_length=2048, gradient_accumulation_steps=4)
trainer = SFTTrainer("m", args=args, peft_config=LoraConfig(r=16, target_modules=["q_proj"]))
""",
    )
    job = work.resolve("python train.py")
    assert (job.loop, job.micro_batch_size, job.seq_len, job.model.source) == ("sft", 2, 2048, "m")
    assert job.lora is not None and (job.lora.r, job.lora.target_modules, job.lora.lora_alpha) == (16, ("q_proj",), 8)
    assert job.origin("micro_batch_size") == Origin("train.py", "4")


def test_arguments_win_over_literals(work) -> None:
    work.write("train.py", "from transformers import Trainer\nTrainingArguments(per_device_train_batch_size=2)\n")
    job = work.resolve("python train.py --model_name_or_path m --per_device_train_batch_size 5 --max_length 9")
    assert job.micro_batch_size == 5


def test_a_script_that_calls_backward_has_a_loop_of_its_own(work) -> None:
    """However its arguments are called."""
    line = "python train.py --model_name_or_path m --per_device_train_batch_size 2 --max_length 9"
    work.write("train.py", "import torch\nloss = model(x)\nloss.backward()\n")
    assert work.resolve(line).loop == "torch"
    work.write("train.py", "engine.backward(loss)\n")
    assert work.resolve(line).loop == "trainer"


@pytest.mark.parametrize("text", ["def broken(:\n", "\0", "import os\nos._exit(1)\n"])
def test_source_is_never_run_and_may_be_broken(work, text: str) -> None:
    work.write("train.py", text)
    assert work.resolve("python train.py --model m --batch_size 1 --seq_len 4").loop == "torch"


def test_unknown_sharding_is_said(work, codes) -> None:
    assert "LG213" in codes(work.resolve("torchrun --nproc_per_node 4 gone.py --model m"))


def test_module_scripts_are_found(work) -> None:
    work.write("pkg/__init__.py", "")
    work.write("pkg/train.py", "from trl import DPOTrainer\n")
    assert work.resolve("python -m pkg.train --model_name_or_path m").loop == "dpo"


# ---------------------------------------------------------------- defaults
def test_table_stands_in_for_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_installed, "_parse", lambda *_: None)
    fields = _installed.dataclass_fields.__wrapped__("TrainingArguments")
    assert fields["per_device_train_batch_size"].default == 8
    assert "not installed" in fields["optim"].origin.source
    assert script_args.parse(["--bf16", "--max_grad_norm", "1"], fields)["max_grad_norm"].value == 1.0


def test_setting_order() -> None:
    args = script_args.ScriptArguments({"b": Setting(2, Origin("x"))}, {})
    assert args.setting("a", "b") == Setting(2, Origin("x")) and args.stated("a") is None and args.get("a", default=7) == 7


def test_references_to_arguments_are_followed(work) -> None:
    work.write("train.py", """
from transformers import Trainer, TrainingArguments
p.add_argument("--bs", type=int, default=3)
p.add_argument("--base", default="m")
args = p.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.base, torch_dtype=torch.bfloat16)
targs = TrainingArguments(output_dir="o", per_device_train_batch_size=args.bs, bf16=args.half, max_steps=3)
lora = LoraConfig(r=args.rank)
Trainer(model=get_peft_model(model, lora), args=targs)
""")  # fmt: skip
    job = work.resolve("python train.py --half True --rank 4 --max_length 8")
    assert (job.model.source, job.micro_batch_size, job.precision.autocast) == ("m", 3, "bfloat16")
    assert job.lora is not None and job.lora.r == 4
    assert job.origin("micro_batch_size") == Origin("train.py", "3")
    assert work.resolve("python train.py --bs 7 --half False --rank 4 --max_length 8").micro_batch_size == 7


@pytest.mark.parametrize(
    ("text", "loop"), [("import lightning as L\nL.Trainer()", "torch"), ("from trl import GRPOTrainer, GRPOConfig", "trainer")]
)
def test_other_loops_are_said(work, codes, text: str, loop: str) -> None:
    work.write("train.py", text)
    job = work.resolve("python train.py --model m --batch_size 1 --max_length 8")
    assert job.loop == loop and "LG321" in codes(job)


def test_abbreviated_flags() -> None:
    assert values(["--per_device_train_batch", "4"]) == {"per_device_train_batch_size": 4}
    assert values(["--batch", "8"]) == {"batch": 8}  # a script's own flag, not batch_eval_metrics


def test_longer_than_the_model(work, codes) -> None:
    assert "LG226" in codes(work.resolve("python train.py --model m --batch_size 1 --max_length 4096"))
