"""The table of residuals that the suites fill, printed when the session ends (`pytest -s`, `make conformance`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

Row = tuple[str, str, str, int, int]  # case, phase, quantity, predicted bytes, real bytes


@pytest.fixture(scope="session")
def residuals() -> Iterator[list[Row]]:
    """Append (case, phase, quantity, predicted, real)."""
    rows: list[Row] = []
    yield rows
    if not rows:
        return
    width = max(len(r[0]) for r in rows)
    print(f"\n{'case':{width}}  {'phase':12} {'quantity':9} {'predicted':>12} {'real':>12} {'residual':>9}")
    for case, phase, quantity, predicted, real in rows:
        print(f"{case:{width}}  {phase:12} {quantity:9} {predicted:12} {real:12} {predicted - real:+9d}")
