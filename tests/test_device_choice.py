"""Which card decides: the smallest of a mixed job, the fullest of a node, and what other processes hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launchguard import preflight
from launchguard.errors import InputError
from launchguard.profiles import device
from launchguard.profiles.detect import DetectedDevice
from launchguard.units import GIB


def test_the_smallest_card_of_a_mixed_job_decides() -> None:
    profile, budget = preflight.find_device("a100-80-sxm, a100-40-sxm", "0%")
    assert profile.id == "a100-40-sxm" and budget.usable_bytes == device("a100-40-sxm").total_bytes
    assert device("a100-80-sxm").name in budget.source
    assert preflight.find_device("a100-80-sxm", "0%")[1].source == device("a100-80-sxm").source


def test_what_others_hold_is_taken_off() -> None:
    whole, left = (preflight.find_device("a10", "10%", used)[1] for used in ("0", "6GiB"))
    assert whole.usable_bytes - left.usable_bytes == 6 * GIB and "6.0 GiB in use by others" in left.source
    with pytest.raises(InputError, match="not a size"):
        preflight.find_device("a10", "10%", "a lot")
    with pytest.raises(InputError, match="others hold all"):
        preflight.find_device("a10", "10%", "40GiB")


def test_the_fullest_card_that_the_job_sees_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    cards = [DetectedDevice(dataclasses.replace(device("a10")), free, index) for index, free in ((2, 20 * GIB), (3, 9 * GIB))]
    monkeypatch.setattr(preflight, "detect", lambda environ: seen.append(environ["CUDA_VISIBLE_DEVICES"]) or cards)
    _, budget = preflight.find_device("auto", "0%", "1GiB", {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert seen == ["2,3"] and budget.usable_bytes == 8 * GIB
    assert "free on GPU 3" in budget.source and "in use there" in budget.source
