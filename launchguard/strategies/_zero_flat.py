"""How ZeRO-1/2 cut a flat parameter group over ranks (zero/stage_1_and_2.py:__init__, get_partition_info; deepspeed 0.19.8)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from launchguard.units import round_up

START_ALIGNMENT = 2  # stage_1_and_2.py:nccl_start_alignment_factor


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that a rank owns. offset: first element within the parameter."""

    param: int
    offset: int
    numel: int


class FlatGroup:
    """One param group, flattened and padded to a multiple of 2 x ranks.

    order: parameters as they lie in the buffer; numel: elements of each parameter of the model, by index;
    padded: elements of the buffer; size: elements of one rank's partition.
    """

    def __init__(self, order: Sequence[int], numel: Sequence[int], world: int) -> None:
        self.order, self.numel, self.world = list(order), numel, world
        self.ends = list(accumulate(numel[i] for i in self.order))
        self.total = self.ends[-1]
        self.padded = round_up(self.total, START_ALIGNMENT * world)
        self.size = self.padded // world
        self._position = {p: k for k, p in enumerate(self.order)}

    def members(self, rank: int) -> list[Slice]:
        """What a rank owns, in buffer order; a parameter across a boundary belongs to every rank that it touches."""
        low, high = rank * self.size, (rank + 1) * self.size
        slices = []
        for k in range(bisect_right(self.ends, low), len(self.order)):
            end = self.ends[k]
            start = end - self.numel[self.order[k]]
            if start >= high:
                break
            slices.append(Slice(self.order[k], max(low - start, 0), min(end, high) - max(start, low)))
        return slices

    def whole_numel(self, rank: int) -> int:
        """S_r: elements of all parameters that a rank touches, each counted whole."""
        low, high = rank * self.size, min((rank + 1) * self.size, self.total)
        if low >= self.total:
            return 0
        first, last = bisect_right(self.ends, low), bisect_right(self.ends, high - 1)
        return self.ends[last] - (self.ends[first - 1] if first else 0)

    def owned_numel(self, rank: int) -> int:
        """Elements of a partition that are not padding."""
        return max(0, min(self.total - rank * self.size, self.size))

    def cuts(self, param: int) -> list[tuple[int, int]]:
        """(rank, elements) of one parameter, in order."""
        k = self._position[param]
        start, end = self.ends[k] - self.numel[param], self.ends[k]
        return [
            (rank, min(end, (rank + 1) * self.size) - max(start, rank * self.size))
            for rank in range(start // self.size, (end - 1) // self.size + 1)
        ]


def round_robin(params: Sequence[int], world: int) -> list[int]:
    """stage_1_and_2.py:_round_robin_reorder: every world-th parameter next to another."""
    return [p for first in range(min(world, len(params))) for p in params[first::world]]


def rank_groups(groups: Sequence[FlatGroup], world: int) -> list[tuple[int, ...]]:
    """Ranks by what they hold: the one with the most gradient bytes, rank 0 and the last; every other rank is counted with the
    cheapest of these that holds at least as much. Ranks touch few distinct sets, so this is O(parameters + ranks)."""
    weights = [sum(g.whole_numel(r) for g in groups) for r in range(world)]
    worst = max(range(world), key=weights.__getitem__)
    chosen = sorted({0, worst, world - 1}, key=lambda r: (weights[r], r))
    members: dict[int, list[int]] = {r: [r] for r in chosen}
    for r in range(world):
        if r not in members:
            members[next(c for c in chosen if weights[c] >= weights[r])].append(r)
    return [tuple(members[r]) for r in sorted(members)]
