"""Words and figures that every rendering shares: GiB appear here and nowhere below."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launchguard.job import JobSpec
from launchguard.units import gib
from launchguard.verdict import RankPrediction

CATEGORIES = ("parameters", "gradients", "optimizer_states", "activations", "communication", "temporaries", "overhead")

# Told by another field: the parsed config.json stands behind model.source, and the folder that a callable is imported from too.
_NOT_SHOWN = frozenset({"generation", "lengths", "model.config", "model.python_path"})


class EffectiveValue(NamedTuple):
    """One field of the job as it will run, and who set it."""

    field: str
    value: Any
    origin: str


def telling_digits(a: int, b: int) -> int:
    """Digits after the point that tell two sizes apart, at most 3."""
    for digits in (1, 2):
        if gib(a, digits) != gib(b, digits):
            return digits
    return 3


def rank_names(ranks: Sequence[int], word: str = "rank") -> str:
    """ "rank 7", "ranks 0-6", "ranks 0-2, 5" """
    ordered = sorted(ranks)
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
    return f"{word} {listed}" if len(ordered) == 1 else f"{word}s {listed}"


_STEPS = {"1": "step 1", "2": "a steady step"}
_PHASES = {"load": "loading the model", "prepare": "engine set-up", "resume": "loading a checkpoint", "idle": "between steps"}


def phase_name(phase: str) -> str:
    """ "backward_2" -> "backward (a steady step)"; names that stand for themselves stay."""
    base, _, step = phase.rpartition("_")
    if step in _STEPS and base:
        base = base.replace("_", " ")
        return f"{'optimizer step' if base == 'step' else base} ({_STEPS[step]})"
    return _PHASES.get(phase, phase)


def place(phase: str, module: str) -> str:
    """ "backward (a steady step) of model.layers.31", or the phase alone."""
    name = phase_name(phase)
    return f"{name}, at {module}" if module else name


def grouped_ranks(ranks: Sequence[RankPrediction]) -> list[RankPrediction]:
    """Predictions that read the same are one, with all their ranks."""
    groups: dict[Any, RankPrediction] = {}
    for rank in ranks:
        key = (rank.phases, rank.peak, tuple(rank.breakdown.items()), rank.oom)
        old = groups.get(key)
        groups[key] = rank if old is None else dataclasses.replace(old, ranks=tuple(sorted({*old.ranks, *rank.ranks})))
    return list(groups.values())


def effective_configuration(job: JobSpec) -> Iterator[EffectiveValue]:
    """Every field that some source has set, with the source that won, the launch first; fields nobody set are left out."""
    launch = job.launch
    yield EffectiveValue("launcher", launch.launcher, "command line")
    yield EffectiveValue("world_size", launch.world_size, str(launch.world_size_origin))
    for name, origin in job.origins.items():
        value = None if name in _NOT_SHOWN else plain(job.get(name))
        if value is not None:
            yield EffectiveValue(name, value, str(origin))


def plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)
