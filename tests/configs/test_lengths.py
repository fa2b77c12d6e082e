"""Lengths of samples: the files that are read, and what padding, packing and grouping make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchguard.configs import lengths
from launchguard.errors import InputError

LINE = "python train.py --model_name_or_path m --output_dir out"
SAMPLES = [10] * 50 + [20] * 40 + [100] * 9 + [400]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(SAMPLES)),
        ("a.json", json.dumps({"10": 50, "20": 40, "100": 9, "400": 1})),
        ("a.json", json.dumps({"lengths": SAMPLES})),
        ("a.json", json.dumps([[0] * n for n in SAMPLES])),
        ("a.jsonl", "\n".join(json.dumps({"input_ids": [1] * n}) for n in SAMPLES)),
        ("a.jsonl", '{"length": 10, "count": 50}\n{"length": 20, "count": 40}\n{"length": 100, "count": 9}\n{"length": 400}\n'),
        ("a.csv", "length,count\n10,50\n20,40\n100,9\n400,1\n"),
        ("a.csv", "id,length\n" + "\n".join(f"{i},{n}" for i, n in enumerate(SAMPLES))),
        ("a.csv", "10,50\n20,40\n100,9\n400,1\n"),
    ],
)
def test_every_form_of_file(work: Any, name: str, text: str) -> None:
    work.write(name, text)
    assert lengths.read(name, str(work.path)).counts == ((10, 50), (20, 40), (100, 9), (400, 1))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[]"),
        ("a.json", '{"x": "y"}'),
        ("a.json", "[1.5]"),
        ("a.json", '["a"]'),
        ("a.jsonl", "{}\nnot"),
        ("a.csv", "length\nx\n"),
    ],
)
def test_what_holds_no_lengths_is_refused_with_its_place(work: Any, name: str, text: str) -> None:
    work.write(name, text)
    with pytest.raises(InputError) as caught:
        lengths.read(name, str(work.path))
    assert caught.value.where.startswith(name)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5))
def test_percentiles_grow_with_the_share_and_with_the_batch(samples: list[int], draws: int) -> None:
    histogram = lengths.Histogram(tuple(sorted({n: samples.count(n) for n in samples}.items())))
    found = [histogram.percentile(share, draws) for _, share in lengths.PERCENTILES]
    assert found == sorted(found) and found[-1] == max(samples) == histogram.longest
    assert all(histogram.percentile(share) <= histogram.percentile(share, draws) for _, share in lengths.PERCENTILES)
    assert histogram.largest(draws) == sum(sorted(samples)[-draws:]) and histogram.tokens == sum(samples)


@pytest.mark.parametrize(
    ("arguments", "tokens", "micro_batch"),
    [
        ("", [10, 20, 100, 400], 1),
        ("--per_device_train_batch_size 8", [100, 100, 400, 400], 8),  # the longest of eight
        ("--per_device_train_batch_size 8 --train_sampling_strategy group_by_length", [10, 20, 100, 400], 8),
        ("--max_length 64", [10, 20, 64, 64], 1),
        ("--max_length 64 --pad_to_max_length True", [64, 64, 64, 64], 1),
        ("--max_length 64 --packing True", [64, 64, 64, 64], 1),
        ("--per_device_train_batch_size 4 --padding_free True", [40, 80, 400, 700], 1),  # 400 + 3 x 100 in one row
        ("--pad_to_multiple_of 64", [64, 64, 128, 448], 1),
    ],
)
def test_what_the_arguments_make_of_them(work: Any, codes: Any, arguments: str, tokens: list[int], micro_batch: int) -> None:
    work.write("lengths.json", json.dumps(SAMPLES))
    line = f"{LINE} {arguments}" if "per_device" in arguments else f"{LINE} --per_device_train_batch_size 1 {arguments}"
    job = work.resolve(line.rstrip(), {"lengths": "lengths.json"})
    assert [n for _, n in job.lengths.batch_tokens] == tokens
    assert (job.seq_len, job.micro_batch_size) == (tokens[-1], micro_batch) and not codes(job) & {"LG210", "LG310"}


def test_launchguard_yaml_names_the_file_too(work: Any) -> None:
    work.write("lengths.json", json.dumps(SAMPLES))
    work.write("launchguard.yaml", "lengths: lengths.json\nseq_len: 128\n")
    job = work.resolve(f"{LINE} --per_device_train_batch_size 1")
    assert job.seq_len == 128 and job.lengths.source == "lengths.json" and "the longest sample" in job.lengths.worst


def test_a_saved_dataset(work: Any) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": [[0] * n for n in (3, 5, 3)]}).save_to_disk(str(work.path / "tokenised"))
    assert lengths.read("tokenised", str(work.path)).counts == ((3, 2), (5, 1))
    work.write("empty/x.txt", "")
    with pytest.raises(InputError, match="datasets cannot load it"):
        lengths.read("empty", str(work.path))
