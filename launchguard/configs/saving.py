"""Whether the Trainer writes checkpoints, and of what (transformers 5.24 training_args.py, trainer.py:_save_checkpoint), whether it begins
with one, and what the script makes whole by itself to save it."""

from __future__ import annotations

from launchguard.configs._sources import Sources
from launchguard.configs.evaluation import is_off
from launchguard.configs.script_saves import DEVICE, EVERY_HOST, RANK0, SHARDED
from launchguard.job import Origin


def apply(sources: Sources) -> None:
    """Put saving.* of a Trainer's job that saves while it trains or at its end, nothing for one that does not; resume."""
    args, settings = sources.args, sources.settings
    resumed = args.stated("resume_from_checkpoint")
    if resumed is not None and str(resumed.value).lower() not in ("false", "none", ""):
        settings.put("resume", True, resumed.origin)
    strategy = args.setting("save_strategy")
    called = sources.source.used.get("save_model")
    if strategy is not None and not is_off(strategy.value):
        only = args.setting("save_only_model")
        kept = only is None or not only.value
        settings.put("saving.optimizer", kept, only.origin if only is not None and not kept else strategy.origin)
    elif called is not None:
        settings.put("saving.optimizer", False, Origin(called.source, called.key))


_WORST_FIRST = (DEVICE, EVERY_HOST, RANK0, SHARDED)
_GATHERED_BY = {  # strategy -> kinds of calls that gather under it
    "fsdp1": ("state_dict", "options", "accelerate"), "fsdp2": ("options", "full_tensor", "accelerate"),
    "zero": ("parameters", "16bit", "accelerate", "fp32"),
}  # fmt: skip


def apply_script(sources: Sources) -> None:
    """Put saving.script of a job whose script gathers the model; the strategy must be settled. Only sharded state is gathered."""
    settings, source, strategy = sources.settings, sources.source, str(sources.settings.get("strategy"))
    if strategy.startswith("fsdp") and sources.loop == "accelerate" and "save_state" in source.used:
        settings.put("saving.optimizer", True, source.used["save_state"])
    found = [g for g in source.gathers if g.kind in _GATHERED_BY.get(strategy, ())]
    if strategy == "zero" and settings.get("zero.stage") != 3:
        found = [g for g in found if g.kind == "fp32"]
    if not found or sources.launch.world_size == 1:
        return
    worst = min(found, key=lambda g: _WORST_FIRST.index(g.where))
    if "saving.optimizer" not in settings:
        settings.put("saving.library", False, worst.origin)
        settings.put("saving.optimizer", False, worst.origin)
    settings.put("saving.script", "float32" if worst.kind == "fp32" else worst.where, worst.origin)
    if worst.where in (DEVICE, EVERY_HOST):
        place = "its device" if worst.where == DEVICE else "its host memory"
        message = f"the script makes the whole state dict here, and every rank holds it in {place}: offload_to_cpu and rank0_only bound it"
        settings.note("LG270", "warning", message, worst.origin)
