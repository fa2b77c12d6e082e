"""Whole situations from public reports through the real check: does launchguard say what the user needed to hear?

    python tests/benchmarks/scenarios.py tests/scenarios [DIR ...] [--json OUT] [--jobs N] [--headroom 0%]

A DIR is a scenario, or a folder of scenarios; it may lie anywhere. A scenario is a folder with
    command.txt       the launch command, as typed (line continuations and # comments allowed; NAME=VALUE may stand before it)
    launchguard.yaml  what no file of the user's says: device, node, the longest sequence
    environment.txt   optional: NAME=VALUE lines, the environment that the command is typed in
    home/             optional: the user's home directory (a default Accelerate config lives there)
    ...               the user's files: DeepSpeed JSON, Accelerate YAML, script (read, never run), model config.json
    expect.yaml       source: URL; kind: config | memory; and what launchguard must say, of
        verdict: fits | exceeds | unknown | error (refused before launch: the library would reject it) | any (of the first three)
        phase: load | init | forward | loss | backward | step | eval | save | resume | host, or a list of them: where it fails
        diagnostics: [LG2xx ...]   codes that must be among the notes, or be the code of the error
        values: {field: value}     fields of the effective configuration
        requested: 3.14 GiB        the size that the message names (counted apart)
        fix: what worked; assumed: [what the report does not say]; note: free text

A scenario is right when all that it states is right. The score is per kind. Nothing is launched and no script is run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from launchguard.errors import LaunchguardError
from launchguard.preflight import Outcome, preflight
from launchguard.report.wording import effective_configuration
from launchguard.units import GIB, parse_bytes
from launchguard.verdict import Verdict, worst_rank

KINDS = ("config", "memory")
FAMILIES = ("load", "init", "forward", "loss", "backward", "step", "eval", "save", "resume", "host")
_KEYS = {"source", "kind", "verdict", "phase", "diagnostics", "values", "requested", "fix", "assumed", "note"}
_PREDICTED = ("fits", "exceeds", "unknown")
_FAMILY_OF = {"load": "load", "prepare": "init", "forward": "forward", "backward": "backward", "step": "step", "idle": "step",
              "eval": "eval", "evaluation": "eval", "evaluate": "eval", "save": "save", "resume": "resume", "host": "host",
              "generation": "eval"}  # fmt: skip
_ORDER = ("load", "prepare", "resume", "forward_1", "backward_1", "step_1", "idle", "forward_2", "backward_2", "step_2", "evaluation",
          "generation", "save")  # fmt: skip
_SIZE_TOLERANCE = 0.02  # a message prints three digits, and allocations are rounded up to 2 MiB


class CannotRun(Exception):
    """The folder is no scenario that can be run; the text says why."""


@dataclass(frozen=True)
class Answer:
    """What check said. family: of the phase that fails, else of the peak; requested_bytes: of the allocation that failed."""

    verdict: str
    family: str
    codes: tuple[str, ...]
    values: Mapping[str, Any]
    headline: str
    requested_bytes: int = 0


@dataclass(frozen=True)
class Score:
    """One scenario. checks: check -> right or wrong, for what expect.yaml states; wrong: a line per wrong one; not_run: why, "" if it
    ran."""

    name: str
    kind: str
    checks: Mapping[str, bool] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    not_run: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return not self.not_run and all(right for check, right in self.checks.items() if check != "size")


# ---------------------------------------------------------------- reading
def find(folders: Iterable[Path]) -> list[Path]:
    """Every scenario at or below the folders, by name."""
    found: dict[Path, None] = {}
    for folder in folders:
        for file in sorted([*folder.glob("expect.yaml"), *folder.glob("**/expect.yaml"), *folder.glob("**/command.txt")]):
            found.setdefault(file.parent.resolve())
    return list(found)


def read_expectation(folder: Path) -> dict[str, Any]:
    try:
        expect = yaml.safe_load((folder / "expect.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CannotRun(f"expect.yaml cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(expect, dict) or expect.get("kind") not in KINDS:
        raise CannotRun(f"expect.yaml states no kind ({' or '.join(KINDS)})")
    unknown = sorted(set(expect) - _KEYS)
    if unknown:
        raise CannotRun(f"expect.yaml has unknown keys: {', '.join(unknown)}")
    families = _listed(expect.get("phase"))
    if set(families) - set(FAMILIES) or expect.get("verdict", "any") not in (*_PREDICTED, "error", "any"):
        raise CannotRun(f"expect.yaml: phase {families} or verdict {expect.get('verdict')} is not one of those known")
    if not any(key in expect for key in ("verdict", "phase", "diagnostics", "values")):
        raise CannotRun("expect.yaml expects nothing")
    return expect


def read_command(folder: Path) -> list[str]:
    """The words of command.txt, without shell expansion: launchguard is given what the user's shell would give it."""
    try:
        text = (folder / "command.txt").read_text()
    except OSError:
        raise CannotRun("there is no command.txt") from None
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise CannotRun(f"command.txt is not a command: {error}") from None
    if not words:
        raise CannotRun("command.txt is empty")
    return words


def environment(folder: Path) -> dict[str, str]:
    """A clean environment: no GPU, no hub, a home of the scenario's own, and what environment.txt says."""
    env = {"HF_HUB_OFFLINE": "1", "HOME": str(folder / "home")}
    file = folder / "environment.txt"
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            env[name] = value
    return env


# ---------------------------------------------------------------- asking launchguard
def ask(folder: Path, options: Mapping[str, Any]) -> Answer:
    """The answer of check to the scenario's command, in this process. options: launchguard's own, for all scenarios alike."""
    try:
        outcome = preflight(read_command(folder), environment(folder), str(folder), options, lambda text: None, advise=False)
    except LaunchguardError as error:
        return Answer("error", "", (error.code,) if error.code else (), {}, f"{error.message} ({error.where})")
    return answer_of(outcome)


def answer_of(outcome: Outcome) -> Answer:
    verdict = outcome.verdict
    codes = tuple(dict.fromkeys(note.code for note in verdict.notes))
    values = {entry.field: entry.value for entry in effective_configuration(verdict.job)}
    if not verdict.ranks:
        return Answer(verdict.verdict, "", codes, values, "; ".join(verdict.confidence.reasons))
    worst = worst_rank(verdict.ranks)
    phase, module = (worst.oom.phase, worst.oom.module) if worst.oom is not None else (worst.peak.name, worst.peak.module)
    family = "host" if _host_fails_first(verdict, phase if worst.oom is not None else None) else family_of(phase, module)
    where = f"{phase}{' at ' + module if module else ''}"
    headline = f"{verdict.verdict}: {worst.peak.device_bytes / GIB:.1f} of {verdict.device.budget_bytes / GIB:.1f} GiB, {where}"
    return Answer(verdict.verdict, family, codes, values, headline, worst.oom.requested_bytes if worst.oom else 0)


def _host_fails_first(verdict: Verdict, phase: str | None) -> bool:
    """Is main memory exceeded before the device is? A job dies once; launchguard says both. phase: where the device fails, None if it
    does not. Within a phase the host comes first, but for what reaches it through the device: predictions and gathered weights."""
    over = [node.fails for node in verdict.host if node.fails is not None]
    if not over or phase is None:
        return bool(over)
    host, card = _ORDER.index(over[0]), _ORDER.index(phase)
    return host < card or host == card and phase not in ("evaluation", "save")


def family_of(phase: str, module: str) -> str:
    """ "forward_2" -> "forward"; what forward does outside every submodule is the loss (a Hugging Face model computes it there)."""
    family = _FAMILY_OF.get(phase.split("_")[0], phase.split("_")[0])
    return "loss" if family == "forward" and not module else family


# ---------------------------------------------------------------- scoring
def score(folder: Path, options: Mapping[str, Any] | None = None) -> Score:
    """Run one scenario. A folder that cannot be run is not an error of launchguard's and is counted apart."""
    started = time.perf_counter()
    try:
        expect = read_expectation(folder)
    except CannotRun as error:
        return Score(folder.name, "config", not_run=str(error))
    try:
        answer = ask(folder, options or {})
    except CannotRun as error:
        return Score(folder.name, expect["kind"], not_run=str(error))
    except Exception as error:  # a fault of launchguard's is a wrong answer, not a reason to stop
        return Score(folder.name, expect["kind"], {"verdict": False}, (f"launchguard failed: {type(error).__name__}: {error}",))
    checks, wrong = compare(expect, answer)
    return Score(folder.name, expect["kind"], checks, tuple(wrong), seconds=round(time.perf_counter() - started, 2))


def compare(expect: Mapping[str, Any], answer: Answer) -> tuple[dict[str, bool], list[str]]:
    """check -> right or wrong, and a line per wrong one."""
    checks: dict[str, bool] = {}
    wrong: list[str] = []

    def note(check: str, right: bool, text: str) -> None:
        checks[check] = checks.get(check, True) and right
        if not right:
            wrong.append(f"{check}: {text} [{answer.headline}]")

    wanted = expect.get("verdict")
    if wanted is not None:
        note("verdict", answer.verdict in (_PREDICTED if wanted == "any" else (wanted,)), f"{answer.verdict}, not {wanted}")
    families = _listed(expect.get("phase"))
    if families:
        # the loss is computed inside forward, and a report that says "forward" does not tell them apart
        right = answer.family in families or (answer.family == "loss" and "forward" in families)
        note("phase", right and answer.verdict != "error", f"{answer.family or 'none'}, not {' or '.join(families)}")
    for code in _listed(expect.get("diagnostics")):
        note("diagnostic", code in answer.codes, f"{code} is not among {', '.join(answer.codes) or 'no codes'}")
    for name, value in (expect.get("values") or {}).items():
        note("diagnostic", answer.values.get(name) == value, f"{name} is {answer.values.get(name)}, not {value}")
    if expect.get("requested") is not None:
        size = parse_bytes(str(expect["requested"]))
        note(
            "size",
            abs(answer.requested_bytes - size) <= _SIZE_TOLERANCE * size,
            f"{answer.requested_bytes / GIB:.2f} GiB, not {size / GIB:.2f}",
        )
    return checks, wrong


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(entry) for entry in value] if isinstance(value, list) else [str(value)]


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Counts by kind, failures and folders that were not run."""
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        ran = [s for s in scores if s.kind == kind and not s.not_run]
        checks = {check: [s.checks[check] for s in ran if check in s.checks] for check in ("diagnostic", "verdict", "phase", "size")}
        kinds[kind] = {"ran": len(ran), "right": sum(s.right for s in ran),
                       **{check: {"stated": len(found), "right": sum(found)} for check, found in checks.items()}}  # fmt: skip
    return {
        "scenarios": len(scores), "kinds": kinds, "failures": {s.name: list(s.wrong) for s in scores if not s.not_run and not s.right},
        "not_run": {s.name: s.not_run for s in scores if s.not_run}, "results": [asdict(s) for s in scores],
    }  # fmt: skip


def _share(counts: Mapping[str, int]) -> str:
    return f"{counts['right']}/{counts['stated']}"


def printed(report: Mapping[str, Any]) -> str:
    lines = [f"{'kind':<10}{'ran':>5}{'right':>7}" + "".join(f"{check:>14}" for check in ("diagnostic", "verdict", "phase", "size"))]
    for kind, found in report["kinds"].items():
        parts = "".join(f"{_share(found[c]):>14}" for c in ("diagnostic", "verdict", "phase", "size"))
        lines.append(f"{kind:<10}{found['ran']:>5}{found['right']:>7}{parts}")
    for name, wrong in report["failures"].items():
        lines += [f"wrong    {name}: {line}" for line in wrong]
    lines += [f"not run  {name}: {why}" for name, why in report["not_run"].items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--headroom", metavar="SHARE", help="for all scenarios, in place of launchguard's default")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="scenarios at a time (default 2)")
    options = parser.parse_args(argv)
    missing = [str(folder) for folder in options.folders if not folder.is_dir()]
    if missing:
        parser.error(f"no such folder: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="launchguard-traces-") as cache:
        os.environ.setdefault("LAUNCHGUARD_CACHE_DIR", cache)
        with ProcessPoolExecutor(max_workers=max(1, options.jobs)) as pool:
            asked = {} if options.headroom is None else {"headroom": options.headroom}
            scores = list(pool.map(partial(score, options=asked), find(options.folders)))
    report = summary(scores)
    print(printed(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
