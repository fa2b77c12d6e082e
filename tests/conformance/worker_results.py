"""What a worker of the conformance suites hands to its test: one result for each case, an error where the library or the trace failed."""

from __future__ import annotations

import pickle
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any


def write_results(cases: Sequence[dict[str, Any]], fill: Callable[[dict[str, Any], Any], None], out_file: str) -> None:
    """fill(case, result) puts trace and phases into a result; a configuration that the library rejects is a result too."""
    results = []
    for case in cases:
        result = types.SimpleNamespace(case=case, phases=None, trace=None, error="")
        try:
            fill(case, result)
        except Exception as e:
            result.error = f"{type(e).__name__}: {e}"[:500] + "\n" + "".join(traceback.format_tb(e.__traceback__))[-2500:]
        results.append(vars(result))
    with open(out_file, "wb") as out:
        pickle.dump(results, out)
