"""The table of residuals that the suites fill, printed when a run of this folder ends (`make conformance`).

A suite is a file; its LIMIT says what a residual may be. LAUNCHGUARD_CONFORMANCE=rows prints every row, =all runs DeepSpeed's wide grid
as well. Rows travel with the tests' reports, so that the table is whole under pytest-xdist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

Row = tuple[str, str, str, int, int]  # case, phase, quantity, predicted bytes, real bytes


@pytest.fixture
def residuals(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Append (case, phase, quantity, predicted, real)."""
    rows: list[Row] = []
    yield rows
    limit = getattr(request.module, "LIMIT", "0 B")
    request.node.user_properties.append(("residuals", [request.module.__name__, limit, rows]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    suites: dict[str, tuple[str, list[Row]]] = {}
    for report in [r for reports in terminalreporter.stats.values() for r in reports if getattr(r, "when", "") == "teardown"]:
        for name, value in report.user_properties:
            if name == "residuals":
                suite, limit, rows = value
                suites.setdefault(suite.removeprefix("test_"), (limit, []))[1].extend(tuple(r) for r in rows)
    if not suites:
        return
    say = terminalreporter.write_line
    if os.environ.get("LAUNCHGUARD_CONFORMANCE") in ("rows", "all"):
        _say_rows(say, [r for _, rows in suites.values() for r in rows])
    terminalreporter.section("residuals: predicted - real, in bytes as requested")
    say(f"{'suite':20} {'rows':>6} {'not zero':>8} {'largest':>9} {'of':>12}  limit")
    for suite, (limit, rows) in sorted(suites.items()):
        if rows:
            worst = max(rows, key=lambda r: abs(r[3] - r[4]))
            say(f"{suite:20} {len(rows):6} {sum(r[3] != r[4] for r in rows):8} {worst[3] - worst[4]:+9d} {worst[4]:12}  {limit}")


def _say_rows(say: Any, rows: list[Row]) -> None:
    width = max(len(r[0]) for r in rows)
    say(f"\n{'case':{width}}  {'phase':16} {'quantity':14} {'predicted':>12} {'real':>12} {'residual':>9}")
    for case, phase, quantity, predicted, real in rows:
        say(f"{case:{width}}  {phase:16} {quantity:14} {predicted:12} {real:12} {predicted - real:+9d}")
