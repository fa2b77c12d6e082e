"""Whether the Trainer evaluates, on what, and what it keeps of it (transformers 5.24 training_args.py, trainer.py:evaluate)."""

from __future__ import annotations

from typing import Any

from launchguard.configs._sources import Sources, choice, positive
from launchguard.job import Origin, Setting
from launchguard.units import ceil_div

_SAMPLE_LIMITS = ("max_eval_samples", "max_val_samples", "max_validation_samples")


def apply(sources: Sources) -> None:
    """Put evaluation.* of a Trainer's job that evaluates; nothing for one that does not."""
    when = _when(sources)
    if when is None:
        return
    args, settings = sources.args, sources.settings
    size = args.stated("per_device_eval_batch_size", "per_gpu_eval_batch_size") or args.setting("per_device_eval_batch_size")
    settings.put("evaluation.batch_size", positive(size) if size else 8, size.origin if size else when.origin)
    loss_only = _loss_only(sources)
    sources.put("evaluation.loss_only", loss_only)
    generates = args.stated("predict_with_generate")
    if generates is not None and generates.value and not loss_only.value:  # what is kept are tokens (transformers 5.24 trainer_seq2seq.py)
        settings.put("evaluation.reduced", True, generates.origin)
    for field, name in (("accumulation_steps", "eval_accumulation_steps"), ("concatenate", "eval_do_concat_batches"),
                        ("per_batch", "batch_eval_metrics")):  # fmt: skip
        setting = args.setting(name)
        if setting is not None and (setting.value is not None or field == "accumulation_steps"):
            settings.put(f"evaluation.{field}", setting.value, setting.origin)  # None: all batches, and whose default that is
    samples = args.stated(*_SAMPLE_LIMITS)
    if samples is not None and samples.value:
        batches = ceil_div(positive(samples), int(settings.get("evaluation.batch_size")) * sources.launch.world_size)
        settings.put("evaluation.batches", batches, samples.origin)
    call = sources.source.trainer_call()
    if not loss_only.value and "evaluation.reduced" not in settings and call is not None and "preprocess_logits_for_metrics" in call.names:
        settings.put("evaluation.reduced", True, call.origin)
        message = "what preprocess_logits_for_metrics returns is not read: taken as one number per token (an argmax)"
        settings.note("LG218", "info", message, call.origin)


def _when(sources: Sources) -> Setting | None:
    """What turns evaluation on: an eval_strategy, or --do_eval of a script that calls evaluate() itself."""
    args = sources.args
    strategy = args.stated("eval_strategy", "evaluation_strategy") or args.setting("eval_strategy")
    if strategy is not None and not is_off(strategy.value):
        return strategy
    asked, called = args.stated("do_eval"), sources.source.used.get("evaluate")
    readable = bool(sources.source.name)
    if asked is not None and asked.value and (called or not readable):
        return asked
    return Setting(True, called) if called and asked is None and sources.source.trainer_call() is not None else None


def is_off(strategy: Any) -> bool:
    """True for an interval strategy of "no", however it is spelled ("IntervalStrategy.NO", YAML's false)."""
    return choice(strategy) == "no"


def _loss_only(sources: Sources) -> Setting:
    """The Trainer keeps predictions when it is given compute_metrics, unless prediction_loss_only (trainer.py:evaluate)."""
    stated = sources.args.stated("prediction_loss_only")
    if stated is not None and stated.value:
        return stated
    call = sources.source.trainer_call()
    if call is None or "**" in call.names:
        origin = Origin("default of launchguard", "evaluation.loss_only")
        message = (
            "whether the script gives the Trainer compute_metrics is not known: taken as not, so predictions are dropped batch by batch"
        )
        sources.settings.note("LG217", "warning", f"{message}; --set evaluation.loss_only=false predicts the other case", origin)
        return Setting(True, origin)
    return Setting("compute_metrics" not in call.names, call.origin)
