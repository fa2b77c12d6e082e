"""The report: printed text against golden files, JSON against its schema.

LAUNCHGUARD_UPDATE_GOLDEN=1 rewrites the golden files; the diff is then reviewed like code.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from launchguard.report.json import SCHEMA_FILE, to_dict
from launchguard.report.text import render, render_answer
from launchguard.report.wording import CATEGORIES, gib, grouped_ranks, rank_names, telling_digits
from launchguard.units import GIB, MIB
from launchguard.verdict import Advice, Cause, Verdict
from tests.report import samples

GOLDEN = Path(__file__).parent / "golden"
SAMPLES: dict[str, Callable[[], tuple[Verdict, list[Advice]]]] = {
    "exceeding": samples.exceeding,
    "fitting": samples.fitting,
    "unknown": samples.unknown,
    "host_exceeding": samples.host_exceeding,
}
WITH_SAMPLES = pytest.mark.parametrize("name", SAMPLES)


def compare(path: Path, text: str) -> None:
    if os.environ.get("LAUNCHGUARD_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; LAUNCHGUARD_UPDATE_GOLDEN=1 rewrites it"


@WITH_SAMPLES
def test_printed_report(name: str) -> None:
    compare(GOLDEN / f"{name}.txt", render(*SAMPLES[name](), color=False, width=100))


@WITH_SAMPLES
def test_colour_changes_nothing_but_colour(name: str) -> None:
    colored = render(*SAMPLES[name](), color=True, width=100)
    assert "\x1b[" in colored
    plain = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()) + "\n"
    assert plain == render(*SAMPLES[name](), color=False, width=100)


@WITH_SAMPLES
@pytest.mark.parametrize("width", [60, 100, 200])
def test_wording_holds_at_any_width(name: str, width: int) -> None:
    """Answers are never wrapped, no line trails blanks or a period, and the first word says what it is."""
    text = render(*SAMPLES[name](), color=False, width=width)
    answer = render_answer(*SAMPLES[name](), color=False, width=width)
    assert text.startswith(answer)
    assert re.match(r"(fits|error\[LG10[12]\]|warning\[LG103\]): ", answer)
    assert all(line == line.rstrip() and not line.endswith(".") for line in text.splitlines())


@WITH_SAMPLES
def test_json_is_of_the_schema(name: str) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    report = to_dict(*SAMPLES[name]())
    jsonschema.Draft202012Validator(schema).validate(json.loads(json.dumps(report)))
    for rank in report["ranks"]:
        assert sum(rank["breakdown"].values()) == rank["peak"]["device_bytes"]


def test_json_carries_the_origins() -> None:
    job = to_dict(*samples.exceeding())["job"]
    assert job["zero.stage"] == {"value": 1, "origin": "ds_config.json:zero_optimization.stage"}
    assert job["world_size"] == {"value": 8, "origin": "command line:--num_gpus"}
    assert "model.config" not in job and "max_grad_norm" not in job and "zero.reduce_bucket_size" not in job


def test_schema_refuses_what_it_does_not_know() -> None:
    report = to_dict(*samples.fitting())
    report["ranks"][0]["guess"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))


def test_answer_says_need_and_offer_apart() -> None:
    """A need that rounds to the offer is printed with as many digits as tell them apart."""
    close = samples.rank((0,), 71.21)
    text = render_answer(samples.verdict("exceeds", (close,)), [], color=False, width=100)
    assert "needs 71.21 GiB" in text and "offers 71.19 GiB (79.10 usable - 10% headroom)" in text


def test_many_causes_are_summed() -> None:
    causes = tuple(Cause("activations", f"cause {i}", (20 - i) * GIB, "train.py") for i in range(11))
    sample = dataclasses.replace(samples.exceeding()[0], causes=causes)
    text = render_answer(sample, [], color=False, width=100)
    assert re.search(r"and 3 smaller causes +33.0 GiB", text) and "cause 8" not in text


def test_user_text_is_not_markup() -> None:
    cause = Cause("activations", "[bold]x[/bold] :smile:", GIB, "a[0].json")
    text = render_answer(dataclasses.replace(samples.exceeding()[0], causes=(cause,)), [], color=False, width=100)
    assert "[bold]x[/bold] :smile:" in text and "a[0].json" in text


def test_equal_ranks_are_grouped() -> None:
    groups = grouped_ranks(samples.exceeding()[0].ranks)
    assert [group.ranks for group in groups] == [(0, 1, 2, 3, 4, 5, 6), (7,)]


@pytest.mark.parametrize(
    ("ranks", "text"), [((7,), "rank 7"), ((0, 1, 2), "ranks 0-2"), ((5, 0, 2, 1), "ranks 0-2, 5"), ((0, 2), "ranks 0, 2")]
)
def test_rank_names(ranks: tuple[int, ...], text: str) -> None:
    assert rank_names(ranks) == text


def test_sizes() -> None:
    assert [gib(n) for n in (0, 512, 12 * MIB, GIB, 80 * GIB)] == ["0.0 GiB", "0.0 MiB", "12.0 MiB", "1.0 GiB", "80.0 GiB"]
    assert (telling_digits(GIB, 2 * GIB), telling_digits(GIB, int(1.02 * GIB)), telling_digits(GIB, GIB)) == (1, 2, 3)


def test_every_category_is_reported() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    assert tuple(schema["$defs"]["rank"]["properties"]["breakdown"]["required"]) == CATEGORIES
