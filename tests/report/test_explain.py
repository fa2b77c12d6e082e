"""Every code has a page, every page a code; and the pages are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launchguard.errors import InputError
from launchguard.report import explain
from tests.report import samples

PACKAGE = Path(explain.__file__).parents[1]
CODE = re.compile(r"""["'\[](LG\d{3})["'\]]""")  # "LG248", error[LG101]


def _used() -> set[str]:
    return {
        code for path in PACKAGE.rglob("*.py") for code in CODE.findall(path.read_text(encoding="utf-8")) if "__pycache__" not in path.parts
    }


def test_every_code_of_the_source_has_a_page_and_the_other_way_round() -> None:
    examples = {"LG201"}  # job.py and errors.py name codes in their docstrings, which are codes in use all the same
    assert examples <= _used()
    assert set(explain.codes()) == _used()


@pytest.mark.parametrize("code", explain.codes())
def test_pages_have_the_same_parts(code: str) -> None:
    text = explain.page(code)
    assert text.startswith(f"# {code}: ") and explain.title(code)
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads == ["Example", "What to do", "Source"]
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)
    assert all(len(part.strip()) > 3 for part in parts)


def test_codes_are_found_as_people_type_them() -> None:
    assert explain.page("lg248") == explain.page("[LG248]") == explain.page("248")
    with pytest.raises(InputError, match="no code LG299"):
        explain.page("LG299")


def test_the_list_names_all() -> None:
    text = explain.listing()
    assert all(f"  {code}  {explain.title(code)}" in text for code in explain.codes())


def test_everything_alive_at_the_peak() -> None:
    verdict, _ = samples.exceeding()
    lines = explain.peak(verdict).splitlines()
    assert lines[0] == "ranks 0-3: 82.90 GiB allocated in backward, at model.layers.31"
    assert lines[2:] == ["   14.90 GiB  parameters", "   14.90 GiB    weight",
                         "    3.50 GiB  outside: free cached blocks, CUDA context, communication library"]  # fmt: skip
    assert "nothing could be simulated" in explain.peak(samples.unknown()[0])
