"""How far from a prediction a real run may lie: relative spreads by what is known of the job, applied to the worst rank's peak.

The spreads are what the predictions were off by where they could be measured (tests/measured/RESIDUALS.md): against the real allocator
with equal versions, and against published runs whose software was another or had parts that are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launchguard.job import Note

# shares of the predicted bytes on both sides
EQUAL_VERSIONS = 0.005  # allocated; of 153 virtual-card runs three are further off
ORDER_OF_REQUESTS = 0.03  # reserved beside that: it depends on the order of requests
OTHER_VERSIONS = 0.08  # a library changes what a loss or a step keeps: half to two thirds of the published runs lie inside
NOT_MODELLED = 0.20  # a part of the job is simulated as something else (LG3xx): compile, float8, other kernels


@dataclass(frozen=True)
class Interval:
    """Low and high bytes of the worst rank's peaks."""

    allocated: tuple[int, int]
    reserved: tuple[int, int]
    device: tuple[int, int]


UNKNOWN = Interval((0, 0), (0, 0), (0, 0))


def spread(notes: Iterable[Note]) -> float:
    """Share by which allocated bytes may be off, from what the notes say."""
    doubts = [n for n in notes if n.code.startswith("LG3")]
    if any(n.severity != "info" for n in doubts):
        return NOT_MODELLED
    return OTHER_VERSIONS if doubts else EQUAL_VERSIONS


def interval_of(allocated: int, reserved: int, outside: tuple[int, int], notes: Iterable[Note]) -> Interval:
    """outside: low and high bytes of the process beside torch's allocator. Reserved bytes are never below the allocated ones."""
    share = spread(notes)
    low, high = int(allocated * (1 - share)), int(allocated * (1 + share))
    share += ORDER_OF_REQUESTS
    kept = max(low, int(reserved * (1 - share))), int(reserved * (1 + share))
    return Interval((low, high), kept, (kept[0] + outside[0], kept[1] + outside[1]))
