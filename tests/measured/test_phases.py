"""Evaluation and save against recorded runs of the real Trainer on a virtual card (virtual_phases.yaml), from the launch command on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchguard import configs, launch, strategies, trace
from launchguard.allocator import replay
from launchguard.profiles import device

FILE = Path(__file__).parent / "virtual_phases.yaml"
DOCUMENT = yaml.safe_load(FILE.read_text())
ALLOCATED, RESERVED = 0.001, 0.02  # relative error; scalars of a few KiB are not simulated


@pytest.mark.parametrize("case", DOCUMENT["cases"], ids=[c["id"] for c in DOCUMENT["cases"]])
def test_phases_of_a_recorded_run(case: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DOCUMENT["model"]))
    (tmp_path / "train.py").touch()
    for name in case.get("files", ()):
        (tmp_path / name).write_text(DOCUMENT["files"][name])
    alone = case["command"].startswith("python ")  # the recorded process saw one card
    spec = launch.parse(case["command"].split(), {}, str(tmp_path), gpus_per_node=1 if alone else 8)
    options = {"device": "a100-80-sxm", "seq_len": DOCUMENT["seq_len"], "set": {**DOCUMENT["set"], **case.get("set", {})}}
    job = configs.resolve(spec, options)
    job = job.changed({"versions": {**job.versions, "torch": DOCUMENT["torch"]}})
    card = device(job.device)
    [schedule, *_] = strategies.schedules(job, trace.trace_job(job, card), card)
    predicted = {p.name: p for p in replay(schedule.events).phases}
    for phase, (allocated, reserved) in case["phases"].items():
        assert predicted[phase].allocated_bytes == pytest.approx(allocated, rel=ALLOCATED), phase
        assert predicted[phase].reserved_bytes == pytest.approx(reserved, rel=RESERVED), phase
