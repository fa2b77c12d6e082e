"""Everything the readers of this room look at and write to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launchguard.configs.script_args import ScriptArguments
from launchguard.configs.script_source import ScriptSource
from launchguard.errors import InputError
from launchguard.job import TRAINER_LOOPS, LaunchSpec, Setting, Settings

TRL_LOOPS = ("sft", "dpo")


@dataclass(frozen=True)
class Sources:
    """launch, options: as resolve got them; source, args: the script; config: the model's config.json, None for a callable;
    stated: fields that launchguard.yaml and launchguard's own options set; settings: the fields found so far, all that changes here."""

    launch: LaunchSpec
    options: Mapping[str, Any]
    source: ScriptSource
    args: ScriptArguments
    loop: str
    config: Mapping[str, Any] | None
    settings: Settings
    stated: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def is_trainer(self) -> bool:
        """True when the loop is transformers.Trainer or built on it."""
        return self.loop in TRAINER_LOOPS

    def put(self, field_name: str, setting: Setting | None) -> None:
        """Set a field from a setting, if there is one with a value."""
        if setting is not None and setting.value is not None:
            self.settings.put(field_name, setting.value, setting.origin)


def positive(setting: Setting) -> int:
    """A count that must be 1 or more. Raises InputError for anything else."""
    try:
        number = int(setting.value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise InputError(f"{setting.origin.key.lstrip('-')} is {setting.value}, not a positive number", where=str(setting.origin),
                         help="give 1 or more", code="LG261")  # fmt: skip
    return number


def choice(value: Any) -> str:
    """ "steps" of "steps" and of IntervalStrategy.STEPS; "no" for none, as YAML 1.1 reads a bare `no` as false."""
    text = str(getattr(value, "value", value)).rsplit(".", 1)[-1].lower()
    return "no" if text in ("false", "none", "") else text
