from __future__ import annotations

import pytest

from launchguard.allocator import alloc_conf, parse_conf
from launchguard.errors import InputError
from launchguard.units import MIB


def test_defaults() -> None:
    config = parse_conf("")
    assert (config.large_segment_size, config.max_split_size, config.max_non_split_rounding) == (20 * MIB, None, 20 * MIB)
    assert not config.expandable_segments and config.roundup_divisions == ()


def test_every_key() -> None:
    config = parse_conf(
        "max_split_size_mb:128, large_segment_size_mb:64,garbage_collection_threshold:0.8,per_process_memory_fraction:0.9,"
        "expandable_segments:True,backend:native,pinned_num_register_threads:8,roundup_power2_divisions:4"
    )
    assert config.max_split_size == 128 * MIB
    assert config.max_non_split_rounding == config.large_segment_size == 64 * MIB
    assert (config.garbage_collection_threshold, config.per_process_memory_fraction) == (0.8, 0.9)
    assert config.expandable_segments and config.roundup_divisions == (4,) * 16


def test_division_list() -> None:
    """Below the first key its own value, unnamed sizes none, above the last one what > says."""
    divisions = parse_conf("roundup_power2_divisions:[4:1,16:4,64:8,>:2],expandable_segments:False").roundup_divisions
    assert divisions == (1, 1, 1, 0, 4, 0, 8) + (2,) * 9


@pytest.mark.parametrize(
    ("conf", "fact"),
    [
        ("max_split_size_mb:10", "max_split_size_mb:10 is too small, torch wants at least 20"),
        ("max_split_size_mb:30,large_segment_size_mb:64", "at least 64"),
        ("max_split_size_mb:lots", "max_split_size_mb:lots is no whole number"),
        ("large_segment_size_mb:10", "more than 10"),
        ("max_non_split_rounding_mb:4", "at least 20"),
        ("garbage_collection_threshold:1.0", "not between 0 and 1"),
        ("garbage_collection_threshold:much", "is no number"),
        ("per_process_memory_fraction:1.5", "not between 0 and 1"),
        ("expandable_segments:true", "neither True nor False"),
        ("roundup_power2_divisions:3", "no power of two"),
        ("roundup_power2_divisions:[3:2]", "no power of two"),
        ("backend:jemalloc", "no allocator of torch"),
        ("page_size:4", "is no key of this torch"),
        ("max_split_size_mb", "is no key:value pair"),
        ("expandable_segments=True", "is no key:value pair"),
    ],
)
def test_what_torch_refuses(conf: str, fact: str) -> None:
    with pytest.raises(InputError, match=fact) as error:
        parse_conf(conf)
    assert error.value.where == "PYTORCH_CUDA_ALLOC_CONF" and error.value.help


def test_which_variable_wins() -> None:
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:32", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert alloc_conf(both) == ("expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF")
    assert alloc_conf({"PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}) == ("max_split_size_mb:32", "PYTORCH_ALLOC_CONF")
    assert alloc_conf({}) == ("", "")
