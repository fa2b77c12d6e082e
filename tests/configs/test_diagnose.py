"""What the settled configuration really means: one case that tells and one that does not, for each diagnostic."""

from __future__ import annotations

import pytest

from launchguard.errors import InputError

TRAIN = " --model_name_or_path m --output_dir o --per_device_train_batch_size 1 --max_length 8"
STAGE = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": %d}}'
TRAINER = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"


def test_nothing_to_shard(work, codes) -> None:
    work.write("ds.json", STAGE % 3)
    assert "LG248" in codes(work.resolve("deepspeed --num_gpus 1 t.py --deepspeed ds.json" + TRAIN))
    assert "LG248" not in codes(work.resolve("deepspeed --num_gpus 2 t.py --deepspeed ds.json" + TRAIN))
    assert "LG248" in codes(work.resolve("torchrun --nproc_per_node 1 t.py --fsdp full_shard" + TRAIN))


def test_deepspeed_launcher_without_a_config(work, codes) -> None:
    assert "LG247" in codes(work.resolve("deepspeed --num_gpus 2 t.py" + TRAIN))
    assert "LG247" not in codes(work.resolve("torchrun --nproc_per_node 2 t.py" + TRAIN))


def test_one_process_in_sight_of_many_gpus(work, codes) -> None:
    work.write("t.py", TRAINER + "Trainer(model=None, args=TrainingArguments(output_dir='o'))\n")
    job = work.resolve("python t.py --bf16" + TRAIN, gpus=4)
    assert (job.strategy, job.cards, job.devices, job.precision.autocast) == ("data_parallel", 4, 4, None)
    assert {"LG200"} == codes(job) & {"LG200", "LG209", "LG302"}
    assert work.resolve("python t.py --bf16" + TRAIN, gpus=1).strategy == "single"
    assert work.resolve("torchrun --nproc_per_node 1 t.py --bf16" + TRAIN, gpus=4).strategy == "ddp"


def test_data_parallel_in_a_hand_written_loop(work, codes) -> None:
    work.write("t.py", "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(2, 2))\nloss.backward()\n")
    line = "python t.py --model m --batch_size 1 --seq_len 8"
    assert "LG302" in codes(work.resolve(line, gpus=2)) and "LG302" not in codes(work.resolve(line, gpus=1))


@pytest.mark.parametrize("name, told", [("ds_zero2.json", True), ("stage_3.json", False), ("ds_z2_x.json", True), ("a100.json", False)])
def test_stage_in_the_file_name(work, codes, name: str, told: bool) -> None:
    work.write(name, STAGE % 3)
    assert ("LG243" in codes(work.resolve(f"deepspeed --num_gpus 2 t.py --deepspeed {name}" + TRAIN))) is told


def test_fsdp_of_the_trainer(work, codes) -> None:
    assert {"LG230", "LG232"} <= codes(work.resolve(["torchrun", "--nproc_per_node", "2", "t.py", "--fsdp", "full_shard", *TRAIN.split()]))
    config = '{"version": 1, "transformer_layer_cls_to_wrap": ["L"], "activation_checkpointing": true}'
    found = codes(
        work.resolve(["torchrun", "--nproc_per_node", "2", "t.py", "--fsdp", "full_shard", "--fsdp_config", config, *TRAIN.split()])
    )
    assert "LG242" in found and not {"LG230", "LG232"} & found


def test_upcast(work, codes) -> None:
    line = ["torchrun", "--nproc_per_node", "2", "t.py", "--fsdp", "full_shard", *TRAIN.split()]
    assert "LG233" in codes(work.resolve([*line, "--bf16"])) and "LG233" not in codes(work.resolve(line))


def test_no_wrap_policy(work, codes) -> None:
    line = "accelerate launch --use_fsdp --num_processes 2 --mixed_precision bf16 t.py --model m --batch_size 1 --seq_len 8"
    assert "LG244" in codes(work.resolve(line.replace("t.py", "--fsdp_auto_wrap_policy NO_WRAP t.py")))
    assert "LG244" not in codes(work.resolve(line.replace("t.py", "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP t.py")))


def test_mixed_precision_of_script_and_launcher(work, codes) -> None:
    work.write("t.py", 'from accelerate import Accelerator\nAccelerator(mixed_precision="no")\n')
    line = "accelerate launch --num_processes 1 --mixed_precision %s t.py --model m --batch_size 1 --seq_len 8"
    assert "LG235" in codes(work.resolve(line % "fp16")) and "LG235" not in codes(work.resolve(line % "no"))


def test_lora_that_nothing_takes(work, codes) -> None:
    script = TRAINER + 'model = AutoModelForCausalLM.from_pretrained("m")\nlora = LoraConfig(r=4)\n'
    work.write("t.py", script + "Trainer(model=model, args=TrainingArguments(output_dir='o'))\n")
    job = work.resolve("python t.py --max_length 8")
    assert job.lora is None and "LG236" in codes(job)
    work.write("t.py", script + "Trainer(model=get_peft_model(model, lora), args=TrainingArguments(output_dir='o'))\n")
    job = work.resolve("python t.py --max_length 8")
    assert job.lora is not None and "LG236" not in codes(job)


def test_pinned_device(work, codes) -> None:
    work.write("t.py", TRAINER + 'model = AutoModelForCausalLM.from_pretrained("m").to("cuda:0")\n')
    assert "LG241" in codes(work.resolve("torchrun --nproc_per_node 2 t.py" + TRAIN))
    assert "LG241" not in codes(work.resolve("torchrun --nproc_per_node 1 t.py" + TRAIN))


def test_device_map_with_stage_3(work) -> None:
    work.write("t.py", TRAINER + 'args = TrainingArguments(output_dir="o")\nAutoModelForCausalLM.from_pretrained("m", device_map="auto")\n')
    work.write("ds.json", STAGE % 3)
    with pytest.raises(InputError, match="device_map") as caught:
        work.resolve("deepspeed --num_gpus 2 t.py --deepspeed ds.json" + TRAIN)
    assert (caught.value.code, caught.value.where) == ("LG258", "t.py:3")
    work.write("ds.json", STAGE % 2)
    work.resolve("deepspeed --num_gpus 2 t.py --deepspeed ds.json" + TRAIN)


def test_auto_read_by_zero_init_itself(work) -> None:
    work.write("t.py", TRAINER + 'with deepspeed.zero.Init(config_dict_or_path="ds.json"):\n    pass\n')
    work.write("ds.json", STAGE % 3)
    with pytest.raises(InputError, match="zero.Init reads the file itself") as caught:
        work.resolve("deepspeed --num_gpus 2 t.py --deepspeed ds.json" + TRAIN)
    assert caught.value.code == "LG256"


def test_gpus_of_the_node_from_the_job_file(work) -> None:
    from launchguard import configs

    work.write("launchguard.yaml", "node: {gpus: 4}\n")
    assert configs.gpus_per_node({}, str(work.path)) == 4 and configs.gpus_per_node({"gpus_per_node": 2}, str(work.path)) == 2
    work.write("launchguard.yaml", "node: {cards: 4}\n")
    with pytest.raises(InputError, match="node is"):
        configs.gpus_per_node({}, str(work.path))


def test_checkpointing_twice_and_not_at_all(work, codes) -> None:
    script = "from accelerate import Accelerator\nAccelerator()\n"
    work.write("t.py", script + "model.gradient_checkpointing_enable()\n")
    line = "accelerate launch --use_fsdp --num_processes 2 --mixed_precision bf16 --fsdp_activation_checkpointing true t.py"
    assert "LG237" in codes(work.resolve(line + " --model m --batch_size 1 --seq_len 8"))
    flag = "accelerate launch --num_processes 1 t.py --model m --batch_size 1 --seq_len 8 --gradient_checkpointing"
    assert "LG238" not in codes(work.resolve(flag))
    work.write("t.py", script)
    assert "LG238" in codes(work.resolve(flag))
    assert "LG237" not in codes(work.resolve(line + " --model m --batch_size 1 --seq_len 8"))


def test_an_optimizer_without_a_profile_is_an_upper_bound(work, codes) -> None:
    job = work.resolve("python t.py --optim galore_adamw" + TRAIN)
    assert job.optimizer.name == "adamw" and "LG310" in codes(job)


RAW = "import deepspeed\nfrom transformers import AutoModelForCausalLM, HfDeepSpeedConfig\n"
LOAD = "model = AutoModelForCausalLM.from_pretrained('m')\n"
ENGINE = "engine = deepspeed.initialize(model=model, config='ds.json')\n"


@pytest.mark.parametrize(
    "script, shards",
    [
        (RAW + LOAD + ENGINE, False),
        (RAW + "kept = HfDeepSpeedConfig('ds.json')\n" + LOAD + ENGINE, True),
        (RAW + LOAD + "kept = HfDeepSpeedConfig('ds.json')\n" + ENGINE, False),
        (RAW + "with deepspeed.zero.Init():\n    " + LOAD + ENGINE, True),
    ],
)
def test_zero_init_of_a_hand_written_loop(work, codes, script: str, shards: bool) -> None:
    work.write("ds.json", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    work.write("t.py", script)
    job = work.resolve("deepspeed --num_gpus 2 t.py --seq_len 8")
    assert job.zero.zero_init is shards and ("LG228" in codes(job)) is not shards


@pytest.mark.parametrize(
    "script, shards",
    [
        ("def load():\n    return AutoModelForCausalLM.from_pretrained('m')\nmodel = load()\naccelerator = Accelerator()\n", False),
        ("def load():\n    return AutoModelForCausalLM.from_pretrained('m')\naccelerator = Accelerator()\nmodel = load()\n", True),
        ("def main():\n    a = Accelerator()\n    model = AutoModelForCausalLM.from_pretrained('m')\nmain()\n", True),
        (LOAD + "def main():\n    a = Accelerator()\nmain()\n", False),
    ],
)
def test_the_model_before_the_accelerator(work, codes, script: str, shards: bool) -> None:
    work.write("t.py", "from accelerate import Accelerator\n" + script)
    job = work.resolve("accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 t.py --seq_len 8 --batch_size 1")
    assert job.zero.zero_init is shards and ("LG228" in codes(job)) is not shards


ACCELERATOR = "from accelerate import Accelerator\nAccelerator()\n"


@pytest.mark.parametrize(
    "line, script, told",
    [
        ("accelerate launch --num_processes 2 t.py --mixed_precision bf16", ACCELERATOR, True),
        ("accelerate launch --num_processes 2 t.py --config_file a.yaml", ACCELERATOR, True),
        ("accelerate launch --num_processes 2 t.py --mixed_precision bf16", ACCELERATOR + "p.add_argument('--mixed_precision')\n", False),
        ("accelerate launch --num_processes 2 t.py --mixed_precision bf16", ACCELERATOR + "from own import arguments\n", False),
        ("torchrun --nproc_per_node 2 t.py --master_port=1", ACCELERATOR, True),
        ("torchrun --nproc_per_node 2 t.py --lr=1", ACCELERATOR, False),
    ],
)
def test_a_launchers_flag_behind_a_script_without_it(work, codes, line: str, script: str, told: bool) -> None:
    work.write("t.py", script)
    work.write("a.yaml", "distributed_type: FSDP\nmixed_precision: bf16\n")
    assert ("LG216" in codes(work.resolve(line + " --model m --batch_size 1 --seq_len 8"))) is told


@pytest.mark.parametrize(
    "arguments, script, attached, told",
    [
        ("--lora_r 4", "get_peft_config(m)", False, True),
        ("--use_peft --lora_r 4", "get_peft_config(m)", True, False),
        ("--use_peft --lora_r 4", "None", False, True),
        ("--lora_r 4 --use_peft false", "get_peft_config(m)", False, False),
    ],
)
def test_lora_without_its_switch_or_its_taker(work, codes, arguments: str, script: str, attached: bool, told: bool) -> None:
    handed = "" if script == "None" else f", peft_config={script}"
    parser = "a, m = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()\n"
    work.write("t.py", f"from trl import SFTTrainer\n{parser}SFTTrainer(model=m.model_name_or_path, args=a{handed})\n")
    job = work.resolve(f"torchrun --nproc_per_node 2 t.py {arguments}" + TRAIN)
    assert (job.lora is not None) is attached and ("LG236" in codes(job)) is told
