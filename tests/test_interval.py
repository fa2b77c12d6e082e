"""The interval round a prediction: wider for other versions, wider still for what is not modelled."""

from __future__ import annotations

import pytest

from launchguard.interval import EQUAL_VERSIONS, NOT_MODELLED, ORDER_OF_REQUESTS, OTHER_VERSIONS, interval_of
from launchguard.job import Note

VERSION, UNMODELLED, ASSUMED = Note("LG330", "info", ""), Note("LG311", "warning", ""), Note("LG210", "warning", "")


@pytest.mark.parametrize(
    ("notes", "share"),
    [((), EQUAL_VERSIONS), ((ASSUMED,), EQUAL_VERSIONS), ((VERSION,), OTHER_VERSIONS), ((VERSION, UNMODELLED), NOT_MODELLED)],
)
def test_notes_widen_it(notes: tuple[Note, ...], share: float) -> None:
    found = interval_of(1000_000, 2000_000, (10, 30), notes)
    assert found.allocated == (int(1000_000 * (1 - share)), int(1000_000 * (1 + share)))
    low, high = int(2000_000 * (1 - share - ORDER_OF_REQUESTS)), int(2000_000 * (1 + share + ORDER_OF_REQUESTS))
    assert found.reserved == (low, high) and found.device == (low + 10, high + 30)


def test_reserved_is_never_below_allocated() -> None:
    found = interval_of(1000_000, 1000_000, (0, 0), ())
    assert found.reserved[0] == found.allocated[0]
