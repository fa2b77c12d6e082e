"""Every scenario of this folder through the real check, as tests/benchmarks/scenarios.py runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import scenarios  # noqa: E402

FOLDERS = scenarios.find([HERE])
KNOWN_FAILURES: dict[str, str] = yaml.safe_load((HERE / "known_failures.yaml").read_text()) or {}


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """Traces are shared by all scenarios, also between pytest's worker processes; LAUNCHGUARD_SCENARIO_TRACES keeps them between runs."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if hasattr(request.config, "workerinput") else base
    monkeypatch.setenv("LAUNCHGUARD_CACHE_DIR", os.environ.get("LAUNCHGUARD_SCENARIO_TRACES", str(root / "scenario-traces")))


def _cases() -> list[object]:
    marked = []
    for folder in FOLDERS:
        cause = KNOWN_FAILURES.get(folder.name)
        marks = [pytest.mark.xfail(reason=cause, strict=True)] if cause else []
        marked.append(pytest.param(folder, id=folder.name, marks=marks))
    return marked


@pytest.mark.parametrize("folder", _cases())
def test_scenario(folder: Path) -> None:
    found = scenarios.score(folder)
    assert not found.not_run, found.not_run
    assert found.right, "\n".join(found.wrong)


def test_known_failures_are_scenarios() -> None:
    assert not set(KNOWN_FAILURES) - {folder.name for folder in FOLDERS}


def test_every_scenario_names_its_source_and_what_was_assumed() -> None:
    for folder in FOLDERS:
        expect = scenarios.read_expectation(folder)
        assert str(expect["source"]).startswith("https://"), folder.name
        assert expect.get("assumed"), f"{folder.name}: a report never says everything"


def test_there_are_enough_of_each_kind() -> None:
    kinds = [scenarios.read_expectation(folder)["kind"] for folder in FOLDERS]
    assert kinds.count("config") >= 40 and kinds.count("memory") >= 45
