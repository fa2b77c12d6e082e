"""Combinations of training arguments that the Trainer refuses when it starts (transformers 5.24 training_args.py:_validate_args,
trainer.py:Trainer._validate_args), in its own words: read from its source, for making TrainingArguments would look for a GPU."""

from __future__ import annotations

from launchguard.configs._sources import Sources, choice
from launchguard.errors import InputError

_WITH_EVALUATION = ("reduce_lr_on_plateau", "greedy")


def refuse(sources: Sources) -> None:
    """Raise InputError for arguments that the Trainer would stop at; the strategy must be settled."""
    _numbers(sources)
    _best_model(sources)
    _save_only_model(sources)


def _fail(sources: Sources, argument: str, reason: str, help_: str) -> None:
    stated = sources.args.stated(argument)
    raise InputError(reason, where=str(stated.origin if stated else argument), help=help_, code="LG261")


def _numbers(sources: Sources) -> None:
    args = sources.args
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
