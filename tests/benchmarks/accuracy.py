"""The accuracy of launchguard on measured cases (schema: tests/measured/SCHEMA.md), deterministic and offline.

    python tests/benchmarks/accuracy.py FILE... [--json OUT] [--jobs 2] [--filter TEXT] [--markdown]

Model configs are looked up beside each file. Tables go to stdout, progress to stderr. The exit code is 0 when the files could be read,
whatever the scores; 2 when one could not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulate_case import METRICS, Result, run_case
from truth_cases import Case

GROUPINGS = ("framework", "method", "stack", "confidence", "group")
WORST = 20
NARROW = 8.0  # half width of an interval, in percent of the prediction


# ------------------------------------------------------------------------------------------------ cases in, results out
def read_cases(path: Path, text: str = "") -> list[Case]:
    """The cases of a file, those whose id or group contains `text`. ValueError when it is no list of cases."""
    loaded = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if isinstance(loaded, dict):
        loaded = loaded.get("cases")
    if not isinstance(loaded, list) or not all(isinstance(c, dict) for c in loaded):
        raise ValueError(f"{path} is not a list of cases")
    return [c for c in loaded if text in str(c.get("id")) or text in str(c.get("group"))]


def run_all(work: Sequence[tuple[Case, Path]], jobs: int, use_cache: bool, timeout_s: int) -> list[Result]:
    """Results in the order of the cases, whatever the number of processes."""
    _warm_up()
    results: list[Result | None] = [None] * len(work)
    remaining = list(range(len(work)))
    while remaining:
        done = _run_some(work, remaining, results, jobs, use_cache, timeout_s)
        if not done:  # a worker process died (out of host memory?): leave out the first case that has no result
            case, _ = work[remaining[0]]
            results[remaining[0]] = {"id": str(case.get("id")), "kind": str(case.get("kind")), "not_run": "the worker process died",
                                     "not_run_detail": ""}  # fmt: skip
        remaining = [i for i in remaining if results[i] is None]
    return [r for r in results if r is not None]


def _run_some(
    work: Sequence[tuple[Case, Path]], indexes: Sequence[int], results: list[Result | None], jobs: int, use_cache: bool, timeout_s: int
) -> int:  # fmt: skip
    """Run cases until all are done or the pool breaks; how many were done."""
    done = 0
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(run_case, work[i][0], work[i][1], use_cache, timeout_s): i for i in indexes}
        for future in as_completed(futures):
            i = futures[future]
            try:
                results[i] = result = future.result()
            except BrokenProcessPool:
                break
            done += 1
            print(f"[{len(work) - results.count(None)}/{len(work)}] {_line(result)}", file=sys.stderr, flush=True)
    return done


def _warm_up() -> None:
    """Import what the trace workers need, so that they fork warm."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    except ImportError:
        pass


def _line(r: Result) -> str:
    if "not_run" in r:
        return f"{r['id']}: not run: {r['not_run']} {r.get('not_run_detail', '')}"[:200]
    if r["kind"] == "measured":
        also = "".join(f", {a['metric']} {a['error_pct']:+.2f} %" for a in r["also"])
        oom = ", predicted out of memory" if r["predicted_oom"] else ""
        return f"{r['id']}: {r['metric']} {r['error_pct']:+.2f} %{also}{oom} ({r['seconds']} s)"
    return f"{r['id']}: {r['kind']}, said {r['verdict']} ({r['seconds']} s)"


# ------------------------------------------------------------------------------------------------ scores
def summary(errors: Sequence[float]) -> dict[str, float | int]:
    """Of signed errors in percent. max_under_pct: the largest under-prediction, as a positive number."""
    if not errors:
        return {"n": 0}
    absolute = sorted(abs(e) for e in errors)
    return {
        "n": len(errors),
        "median_abs_pct": round(statistics.median(absolute), 3),
        "p90_abs_pct": round(percentile(absolute, 0.9), 3),
        "mean_abs_pct": round(statistics.fmean(absolute), 3),
        "mean_signed_pct": round(statistics.fmean(errors), 3),
        "max_under_pct": round(max(0.0, -min(errors)), 3),
    }


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks of a sorted sequence."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def score(results: Sequence[Result]) -> dict[str, Any]:
    """The JSON document (design.md section 7)."""
    ran = [r for r in results if "not_run" not in r]
    measured = [r for r in ran if r["kind"] == "measured"]
    document: dict[str, Any] = {
        "cases": len(results),
        "ran": len(ran),
        "not_run": dict(Counter(r["not_run"] for r in results if "not_run" in r).most_common()),
        "metrics": _by(measured, "metric", lambda r: r["error_pct"], METRICS),
        "also": _also(measured),
    }
    for key in GROUPINGS:
        document[f"by_{key}"] = _by(measured, key, lambda r: r["error_pct"])
    document |= {
        "per_group": summary([statistics.fmean(r["error_pct"] for r in rs) for rs in _split(measured, "group").values()]),
        "boundary": _boundary(ran),
        "smallest_card": summary(
            [100 * (r["smallest_card_predicted"] / r["smallest_card_measured"] - 1) for r in ran if "smallest_card_measured" in r]
        ),
        "interval": _interval(measured),
        "measured_but_predicted_oom": [r["id"] for r in measured if r["predicted_oom"]],
        "worst": [
            {k: r[k] for k in ("id", "metric", "measured", "predicted", "error_pct", "peak_phase")} for r in _worst(measured)[:WORST]
        ],
        "results": list(results),
    }
    return document


def _split(results: Iterable[Result], key: str) -> dict[str, list[Result]]:
    parts: dict[str, list[Result]] = {}
    for r in results:
        parts.setdefault(r[key], []).append(r)
    return parts


def _by(results: Sequence[Result], key: str, error: Callable[[Result], float], names: Sequence[str] = ()) -> dict[str, Any]:
    parts = _split(results, key)
    return {name: summary([error(r) for r in parts.get(name, [])]) for name in names or sorted(parts)}


def _also(measured: Sequence[Result]) -> dict[str, Any]:
    others = [a for r in measured for a in r["also"]]
    return _by(others, "metric", lambda a: a["error_pct"], sorted({a["metric"] for a in others}))


def _boundary(ran: Sequence[Result]) -> dict[str, Any]:
    counts = {"oom": 0, "missed_oom": 0, "fits": 0, "false_alarm": 0}
    wrong = []
    for r in ran:
        if r["kind"] in ("fits", "oom"):
            counts[r["kind"]] += 1
            counts["missed_oom" if r["kind"] == "oom" else "false_alarm"] += not r["right"]
            if not r["right"]:
                wrong.append(r["id"])
    return {**counts, "wrong": wrong}


def _interval(measured: Sequence[Result]) -> dict[str, float | int]:
    """Coverage of the interval that a verdict states, of all cases and of those whose interval is at most 8 % to each side."""
    with_one = [r for r in measured if "interval" in r]
    if not with_one:
        return {"n": 0}
    inside = [r["interval"][0] <= r["measured"] <= r["interval"][1] for r in with_one]
    halfwidths = [50 * (r["interval"][1] - r["interval"][0]) / r["predicted"] for r in with_one]
    narrow = [i for i, half in zip(inside, halfwidths) if half <= NARROW]
    return {
        "n": len(with_one),
        "inside_pct": round(100 * statistics.fmean(inside), 1),
        "median_halfwidth_pct": round(statistics.median(halfwidths), 2),
        "narrow_n": len(narrow),
        "narrow_inside_pct": round(100 * statistics.fmean(narrow), 1) if narrow else 0.0,
    }


def _worst(measured: Sequence[Result]) -> list[Result]:
    return sorted(measured, key=lambda r: (-abs(r["error_pct"]), r["id"]))


# ------------------------------------------------------------------------------------------------ printing
COLUMNS = (("n", "n"), ("median", "median_abs_pct"), ("p90", "p90_abs_pct"), ("mean", "mean_abs_pct"), ("signed", "mean_signed_pct"),
           ("max under", "max_under_pct"))  # fmt: skip


def table(title: str, rows: dict[str, dict[str, Any]], markdown: bool) -> list[str]:
    """Lines of one table of summaries; errors in percent."""
    cells = [[name, *(_cell(s.get(key)) for _, key in COLUMNS)] for name, s in rows.items() if s.get("n")]
    if not cells:
        return []
    return [*_grid([title, *(name for name, _ in COLUMNS)], cells, markdown), ""]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _cell(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def _grid(head: Sequence[str], cells: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    lines = [[f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths))] for row in [head, *cells]]
    if not markdown:
        return ["  ".join(line) for line in lines]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return ["| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]]


def report(document: dict[str, Any], markdown: bool) -> list[str]:
    """The printed report: errors in percent of what was measured."""
    lines = [f"{document['ran']} of {document['cases']} cases ran; errors in percent, signed = predicted - measured", ""]
    lines += table("metric", document["metrics"], markdown)
    lines += table("also measured", document["also"], markdown)
    for key in ("framework", "method", "stack", "confidence"):
        lines += table(key, document[f"by_{key}"], markdown)
    lines += table("one figure per group", {"groups": document["per_group"]}, markdown)
    lines += table("smallest card", {"virtual cards": document["smallest_card"]}, markdown)
    b = document["boundary"]
    lines += [f"boundary: {b['missed_oom']} of {b['oom']} OOMs missed, {b['false_alarm']} false alarms in {b['fits']} runs that fit"]
    lines += [f"  wrong: {', '.join(b['wrong'])}"] if b["wrong"] else []
    i = document["interval"]
    if i["n"]:
        lines += [
            f"interval: {i['inside_pct']} % of {i['n']} inside, median half width {i['median_halfwidth_pct']} %; "
            f"{i['narrow_inside_pct']} % of the {i['narrow_n']} whose half width is at most {NARROW:.0f} %"
        ]
    oom = document["measured_but_predicted_oom"]
    lines += [f"measured runs predicted out of memory: {len(oom)}{': ' if oom else ''}{', '.join(oom)}", ""]
    worst = [
        [w["id"], w["metric"], _gib(w["measured"]), _gib(w["predicted"]), f"{w['error_pct']:+.2f}", w["peak_phase"]]
        for w in document["worst"]
    ]
    lines += [*_grid(["worst", "metric", "measured GiB", "predicted GiB", "error", "peak in"], worst, markdown), ""] if worst else []
    if document["not_run"]:
        rows = [[reason, str(n)] for reason, n in document["not_run"].items()]
        lines += _grid(["not run because", "cases"], rows, markdown)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write scores and every case's result")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default 1)")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases whose id or group contains TEXT")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--no-cache", action="store_true", help="trace every model anew")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="per case (default 600)")
    args = parser.parse_args(argv)
    work: list[tuple[Case, Path]] = []
    for path in args.files:
        try:
            work += [(case, path.parent) for case in read_cases(path, args.filter)]
        except (OSError, ValueError, yaml.YAMLError) as e:
            print(f"accuracy.py: {e}", file=sys.stderr)
            return 2
    document = score(run_all(work, max(1, args.jobs), not args.no_cache, args.timeout))
    print("\n".join(report(document, args.markdown)))
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
