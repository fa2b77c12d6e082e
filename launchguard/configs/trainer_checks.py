"""Combinations of training arguments that the Trainer refuses when it starts (transformers 5.24 training_args.py:_validate_args,
trainer.py:Trainer._validate_args), in its own words: read from its source, for making TrainingArguments would look for a GPU."""

from __future__ import annotations

import difflib

from launchguard.configs import script_source, training_args
from launchguard.configs._installed import dataclass_fields, enum_values, trainer_keywords
from launchguard.configs._sources import Sources, choice
from launchguard.errors import InputError

_ENUMS = {"lr_scheduler_type": "SchedulerType", "eval_strategy": "IntervalStrategy", "logging_strategy": "IntervalStrategy",
          "save_strategy": "SaveStrategy", "hub_strategy": "HubStrategy", "optim": "OptimizerNames"}  # fmt: skip
_OF_PARSERS = {"config", "args_file", "local_rank"}  # TrlParser's own, HfArgumentParser's, and what the deepspeed launcher adds
_PLAIN = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig")
_RENAMED = {"evaluation_strategy": "eval_strategy", "per_gpu_train_batch_size": "per_device_train_batch_size", "no_cuda": "use_cpu",
            "tokenizer": "processing_class", "max_seq_length": "max_length of SFTConfig", "group_by_length": "train_sampling_strategy",
            "warmup_ratio": "warmup_steps, a share below 1"}  # fmt: skip
_WITH_EVALUATION = ("reduce_lr_on_plateau", "greedy")


def refuse(sources: Sources) -> None:
    """Raise InputError for arguments that the Trainer would stop at; the strategy must be settled."""
    _choices(sources)
    _numbers(sources)
    _groups(sources)
    _best_model(sources)
    _save_only_model(sources)


def _fail(sources: Sources, argument: str, reason: str, help_: str) -> None:
    stated = sources.args.stated(argument)
    raise InputError(reason, where=str(stated.origin if stated else argument), help=help_, code="LG261")


def _choices(sources: Sources) -> None:
    """Values of transformers' enumerations; programs with names of their own (axolotl, LLaMA-Factory) are left alone."""
    script = str(sources.launch.script or "")
    for name, enum in _ENUMS.items() if not script.startswith(("axolotl.", "llamafactory.")) else ():
        stated = sources.args.stated(name)
        text = choice(stated.value) if stated is not None and isinstance(stated.value, (str, bool)) else ""
        known = {value.lower() for value in enum_values(enum)}
        if stated is None or not text or not known or text in known or (name == "optim" and text in training_args.OPTIMIZERS):
            continue
        close = difflib.get_close_matches(text, sorted(known), n=3, cutoff=0.4) or sorted(known)[:6]
        _fail(sources, name, f"{text} is not a valid {enum}", f"one of {', '.join(close)}")


def _groups(sources: Sources) -> None:
    """Prompts of GRPO come in whole groups of completions (trl 1.16 trainer/grpo_config.py:GRPOConfig.__post_init__)."""
    args = sources.args
    if not {"GRPOConfig", "GRPOTrainer"} & set(sources.source.used):
        return
    if args.get("auto_find_batch_size"):
        _fail(sources, "auto_find_batch_size", "auto_find_batch_size would break groups of completions, so GRPO refuses it", "drop it")
    each, micro = args.get("num_generations", default=8), int(sources.settings.get("micro_batch_size") or 8)
    steps = args.get("steps_per_generation", default=int(sources.settings.get("gradient_accumulation_steps") or 1))
    whole = args.get("generation_batch_size", default=None) or micro * sources.launch.world_size * steps
    if isinstance(each, int) and isinstance(whole, int) and (each < 2 or whole % each):
        reason = f"generation_batch_size ({whole}) must be divisible by num_generations ({each})"
        reason = f"num_generations is {each}: GRPO needs at least 2" if each < 2 else reason
        _fail(sources, "num_generations", reason, "change per_device_train_batch_size, the number of ranks or num_generations")
    stated = args.stated("per_device_train_batch_size")
    if stated is not None and isinstance(each, int):
        message = f"GRPO's batch counts completions: {micro} on each rank, and one prompt has {each} of them"
        sources.settings.note("LG263", "info", message, stated.origin)


def unknown_arguments(sources: Sources) -> None:
    """LG262: arguments that the installed classes do not have. A TypeError there; a note here, for the job's libraries may be others."""
    source = sources.source
    found: dict[str, tuple[str, str]] = {}
    for call in source.calls:
        taken = frozenset(dataclass_fields(call.name)) if call.name in _PLAIN else trainer_keywords(call.name)
        for name in sorted(call.names - {"**"} - taken) if taken else ():
            found.setdefault(name, (call.name, str(call.origin)))
    parsed = source.first(*script_source.ARGUMENT_PARSERS)
    if parsed is not None and sources.args.fields and "return_remaining_strings" not in parsed.names and not source.foreign():
        classes = (*_PLAIN, "ModelConfig", "ScriptArguments")
        taken = frozenset().union(*(dataclass_fields(name) for name in classes)) | source.declared | _OF_PARSERS
        for name, setting in sources.args.given.items():
            if setting.origin.source == "command line" and setting.origin.key.startswith("--") and name not in taken:
                found.setdefault(name, ("the script's parser", str(setting.origin)))
    for name, (owner, where) in found.items():
        successor = _RENAMED.get(name)
        message = f"{owner} has no argument {name} with the installed libraries, and would stop there"
        sources.settings.note("LG262", "error", message + (f"; it is {successor} now" if successor else ""), where)


def _numbers(sources: Sources) -> None:
    args = sources.args
    if args.get("fp16_full_eval") and args.get("bf16_full_eval"):
        _fail(sources, "fp16_full_eval", "at most one of fp16 and bf16 can be True for full eval, but not both", "keep one")
    workers, factor = args.get("dataloader_num_workers", default=0), args.stated("dataloader_prefetch_factor")
    if factor is not None and factor.value is not None and workers == 0:
        _fail(sources, "dataloader_prefetch_factor", "dataloader_prefetch_factor needs dataloader_num_workers > 0", "give both, or neither")
    if choice(args.get("logging_strategy", default="steps")) == "steps" and args.get("logging_steps", default=500) == 0:
        _fail(sources, "logging_steps", "logging_strategy steps requires non-zero logging_steps", "give 1 or more")
    scheduler = choice(args.get("lr_scheduler_type", default="linear"))
    if scheduler in _WITH_EVALUATION and choice(args.get("eval_strategy", default="no")) == "no":
        _fail(sources, "lr_scheduler_type", f"lr_scheduler_type {scheduler} requires an eval strategy", "set eval_strategy")
    warmup = args.get("warmup_steps", default=0)
    if isinstance(warmup, (int, float)) and warmup < 0:
        _fail(sources, "warmup_steps", f"warmup_steps is {warmup}, and must be 0 or more", "give 0 or more")


def _best_model(sources: Sources) -> None:
    args = sources.args
    if not args.get("load_best_model_at_end"):
        return
    evaluates, saves = choice(args.get("eval_strategy", default="no")), choice(args.get("save_strategy", default="steps"))
    if saves != "best" and evaluates != saves:
        reason = f"load_best_model_at_end requires the save and eval strategy to match: eval_strategy {evaluates}, save_strategy {saves}"
        _fail(sources, "load_best_model_at_end", reason, "make them equal")
    every = args.get("eval_steps", default=None) or args.get("logging_steps", default=500)
    steps = args.get("save_steps", default=500)
    whole = all(isinstance(n, (int, float)) and n >= 1 for n in (every, steps))
    if saves == evaluates == "steps" and whole and steps % every:
        reason = f"load_best_model_at_end requires the saving steps to be a round multiple of the evaluation steps: {steps} and {every}"
        _fail(sources, "load_best_model_at_end", reason, "make save_steps a multiple of eval_steps")


def _save_only_model(sources: Sources) -> None:
    args, strategy = sources.args, str(sources.settings.get("strategy"))
    if not args.get("save_only_model"):
        return
    wrapper = "DeepSpeed" if strategy == "zero" else "FSDP" if strategy.startswith("fsdp") else None
    if wrapper and args.get("load_best_model_at_end"):
        _fail(sources, "save_only_model", f"{wrapper} cannot be used with save_only_model along with load_best_model_at_end", "drop one")
