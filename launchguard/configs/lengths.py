"""--lengths FILE: how long the samples are, and what the training arguments make of them: the longest batch and its percentiles.

Rules: transformers 5.24 training_args.py (train_sampling_strategy; group_by_length in 4.x), trainer_pt_utils.py:LengthGroupedSampler (the
longest sample is in the first batch), data/data_collator.py:DataCollatorWithPadding (a batch is as long as its longest sample); trl 1.16
trainer/sft_config.py (packing, padding_free, pad_to_multiple_of).
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchguard.configs import _files
from launchguard.configs._sources import Sources
from launchguard.errors import InputError
from launchguard.job import LengthSpec, Origin, Setting
from launchguard.units import round_up

PERCENTILES = (("p50", 0.50), ("p90", 0.90), ("p99", 0.99), ("max", 1.0))
_COLUMNS = ("length", "lengths", "num_tokens", "n_tokens", "tokens")
_HELP = "a list of lengths, {length: count}, JSON lines with length or input_ids, or a CSV with the columns length and count"
_PACKING = ("packing", "sample_packing", "neat_packing")
_PAD_TO_MAX = ("pad_to_max_length", "pad_to_sequence_len")


@dataclass(frozen=True)
class Histogram:
    """Samples by length: (length, count), shortest first."""

    counts: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        return self.counts[-1][0]

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in self.counts)

    def clipped(self, limit: int) -> Histogram:
        """Truncated to a limit."""
        found = Counter[int]()
        for length, count in self.counts:
            found[min(length, limit)] += count
        return Histogram(tuple(sorted(found.items())))

    def percentile(self, share: float, draws: int = 1) -> int:
        """Length that the longest of `draws` samples does not exceed in `share` of the batches: its distribution is F(x) ** draws."""
        total, below = sum(count for _, count in self.counts), 0
        for length, count in self.counts:
            below += count
            if (below / total) ** draws >= share:
                return length
        return self.longest

    def largest(self, n: int) -> int:
        """Tokens of the n longest samples together."""
        left, tokens = n, 0
        for length, count in reversed(self.counts):
            taken = min(left, count)
            tokens, left = tokens + taken * length, left - taken
        return tokens


# ---------------------------------------------------------------- reading
def read(name: str, cwd: str) -> Histogram:
    """The lengths in a file, or in a folder of the datasets library. Raises InputError for anything that holds none."""
    if os.path.isdir(_files.resolve_path(name, cwd)):
        pairs = _of_dataset(_files.resolve_path(name, cwd), name)
    else:
        text = _files.read_text(name, cwd, "file of lengths")
        pairs = _of_csv(text, name) if name.endswith((".csv", ".tsv")) else _of_json(text, name)
    counts = Counter[int]()
    for length, count in pairs:
        if length > 0 and count > 0:
            counts[length] += count
    if not counts:
        raise InputError(f"{name} holds no lengths", where=name, help=_HELP)
    return Histogram(tuple(sorted(counts.items())))


def _of_json(text: str, name: str) -> Iterator[tuple[int, int]]:
    try:
        yield from _pairs(json.loads(text), name)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield _sample(json.loads(line), f"{name}:{number}")
                except json.JSONDecodeError:
                    raise InputError("this line is no JSON", where=f"{name}:{number}", help=_HELP) from None


def _pairs(document: Any, name: str) -> Iterator[tuple[int, int]]:
    if isinstance(document, Mapping) and isinstance(document.get("lengths"), (list, Mapping)):
        document = document["lengths"]
    if isinstance(document, Mapping) and not {*document} & {*_COLUMNS, "input_ids"}:
        for length, count in document.items():
            yield _number(length, name), _number(count, f"{name}:{length}")
    elif isinstance(document, list):
        for at, entry in enumerate(document):
            yield _sample(entry, f"{name}[{at}]")
    else:
        yield _sample(document, name)


def _sample(entry: Any, where: str) -> tuple[int, int]:
    """(length, count) of one entry: a number, a tokenised sample, or an object that says either."""
    if isinstance(entry, Mapping):
        stated = next((entry[column] for column in _COLUMNS if column in entry), None)
        if stated is None and isinstance(entry.get("input_ids"), Sequence):
            stated = len(entry["input_ids"])
        return _number(stated, where), _number(entry.get("count", 1), where)
    if isinstance(entry, list):
        return len(entry), 1
    return _number(entry, where), 1


def _number(value: Any, where: str) -> int:
    try:
        number = float(value)
        if number != int(number) or isinstance(value, bool):
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{value!r} is no number of tokens", where=where, help=_HELP) from None


def _of_csv(text: str, name: str) -> Iterator[tuple[int, int]]:
    rows = [row for row in csv.reader(text.splitlines(), delimiter="\t" if name.endswith(".tsv") else ",") if any(row)]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    column, counted = next((header.index(c) for c in _COLUMNS if c in header), 0), header.index("count") if "count" in header else None
    has_header = any(not cell.replace(".", "").isdigit() for cell in header)
    if not has_header and len(header) == 2:
        counted = 1
    for number, row in enumerate(rows[has_header:], 1 + has_header):
        try:
            yield _number(row[column], f"{name}:{number}"), 1 if counted is None else _number(row[counted], f"{name}:{number}")
        except IndexError:
            raise InputError("this row has too few columns", where=f"{name}:{number}", help=_HELP) from None


def _of_dataset(path: str, name: str) -> Iterator[tuple[int, int]]:
    """A folder that Dataset.save_to_disk wrote, read by the installed library."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"{name} is a folder, and the datasets library is not installed", where=name, help=_HELP) from None
    try:
        found = datasets.load_from_disk(path)
    except Exception as error:  # whatever the library finds wrong with it
        raise InputError(f"datasets cannot load it: {' '.join(str(error).split())}", where=name, help=_HELP) from None
    found = found.get("train", next(iter(found.values()))) if isinstance(found, Mapping) else found
    column = next((c for c in (*_COLUMNS, "input_ids") if c in found.column_names), None)
    if column is None:
        raise InputError(f"its columns are {', '.join(found.column_names)}: none holds lengths or input_ids", where=name, help=_HELP)
    for entry in found[column]:
        yield (len(entry) if column == "input_ids" else _number(entry, name)), 1


# ---------------------------------------------------------------- what the arguments make of them
def apply(sources: Sources) -> None:
    """Put lengths, and seq_len at the longest batch. The sequence length that is stated is where samples are cut."""
    name = sources.options.get("lengths")
    if name is None:
        return
    settings, args = sources.settings, sources.args
    origin = Origin(str(name), "lengths")
    histogram, cut = read(str(name), sources.launch.cwd), settings.get("seq_len")
    limit = int(cut) if cut else histogram.longest
    histogram, batch = histogram.clipped(limit), int(settings.get("micro_batch_size") or 1)
    multiple = args.get("pad_to_multiple_of", default=None)
    packing, to_max = args.stated(*_PACKING), args.stated(*_PAD_TO_MAX)
    if _on(packing):
        tokens, worst = _flat(min(limit, histogram.tokens)), "packed: every row is as long as the limit"
    elif _on(to_max):
        tokens, worst = _flat(limit), "padded to the limit: every batch is the longest"
    elif _on(args.stated("padding_free")):
        tokens = {label: histogram.percentile(share) * batch for label, share in PERCENTILES} | {"max": histogram.largest(batch)}
        worst = f"padding-free: one row of the {batch} longest samples"
        settings.put("micro_batch_size", 1, origin)
    else:
        grouped = _grouped(sources)
        tokens = {label: histogram.percentile(share, 1 if grouped else batch) for label, share in PERCENTILES}
        worst = "grouped by length: the first batch holds the longest" if grouped else f"any batch of {batch} that draws the longest sample"
    if isinstance(multiple, int) and multiple > 1:
        tokens = {label: round_up(n, multiple) for label, n in tokens.items()}
    settings.put("seq_len", tokens["max"], origin)
    settings.put("lengths", LengthSpec(str(name), tuple(tokens.items()), worst), origin)


def _flat(tokens: int) -> dict[str, int]:
    return {label: tokens for label, _ in PERCENTILES}


def _on(setting: Setting | None) -> bool:
    return setting is not None and bool(setting.value)


def _grouped(sources: Sources) -> bool:
    strategy = sources.args.stated("train_sampling_strategy")
    return _on(sources.args.stated("group_by_length")) or strategy is not None and strategy.value == "group_by_length"
