"""Whether the Trainer writes checkpoints, and of what (transformers 5.24 training_args.py, trainer.py:_save_checkpoint), and whether it
begins with one."""

from __future__ import annotations

from launchguard.configs._sources import Sources
from launchguard.configs.evaluation import is_off
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
