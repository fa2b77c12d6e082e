"""FSDP units: PEFT's policy takes trained leaves apart, and a class name that is missing is refused as Accelerate refuses it."""

from __future__ import annotations

import pytest

from launchguard.errors import InputError
from launchguard.events import ModuleInfo, ParamInfo, StepTrace
from launchguard.fsdp_units import units_of
from launchguard.job import FsdpSpec

MODULES = (
    ModuleInfo("", "Root", -1),
    ModuleInfo("layer", "Layer", 0),
    ModuleInfo("layer.base", "Linear", 1),
    ModuleInfo("layer.lora_A", "Linear", 1),
)
PARAMS = (
    ParamInfo("layer.base.weight", (8, 8), "bfloat16", False, 2, (2,)),
    ParamInfo("layer.lora_A.weight", (2, 8), "float32", True, 3, (3,)),
)
TRACE = StepTrace(PARAMS, MODULES, (), ())


def _names(peft: bool) -> list[tuple[str, tuple[int, ...]]]:
    spec = FsdpSpec(wrap_policy="TRANSFORMER_BASED_WRAP", wrap_classes=("Layer",))
    return [(unit.name, unit.params) for unit in units_of(TRACE, spec, peft=peft)]


def test_trained_leaves_apart() -> None:
    assert _names(peft=False) == [("layer", (0, 1))]
    assert sorted(_names(peft=True)) == [("layer", (0,)), ("layer.lora_A", (1,))]


def test_one_missing_class_is_refused_where_accelerate_looks_names_up() -> None:
    spec = {"wrap_policy": "TRANSFORMER_BASED_WRAP", "wrap_classes": ("Layer", "Other")}
    with pytest.raises(InputError, match="no module of class Other") as caught:
        units_of(TRACE, FsdpSpec(**spec))
    assert caught.value.code == "LG231"
    assert len(units_of(TRACE, FsdpSpec(**spec, accelerate_grouping=False))) == 1
