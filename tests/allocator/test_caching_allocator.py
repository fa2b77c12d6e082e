"""The allocator against recorded traces, documented examples and its own invariants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launchguard.allocator import CachingAllocator, make_allocator, parse_conf
from launchguard.allocator.caching_allocator import round_size, segment_size_for
from launchguard.units import GIB, MIB

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CONFS = sorted({json.loads(path.read_text())["conf"] for path in RECORDED})


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_trace(path: Path) -> None:
    """Every address, allocated, reserved, retry and driver byte of a random trace, as the reference model of torch 2.13/2.14 gives them."""
    trace = json.loads(path.read_text())
    allocator = make_allocator(parse_conf(trace["conf"]), trace["total_bytes"])
    blocks = {}
    for number, (step, expected) in enumerate(trace["steps"]):
        if step[0] == "malloc":
            _, handle, nbytes, stream, address = step
            block = allocator.malloc(nbytes, stream)
            assert (block and block.address) == address, f"step {number}: {step}"
            blocks[handle] = block
        elif step[0] == "free":
            allocator.free(blocks.pop(step[1]))
        else:
            allocator.empty_cache()
        assert [allocator.allocated, allocator.reserved, allocator.retries, allocator.driver.used] == expected, f"step {number}: {step}"


def blocks_of(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    return [[(block["size"], block["state"]) for block in segment["blocks"]] for segment in allocator.snapshot()]


def test_documented_example() -> None:
    """discuss.pytorch.org/t/178671: a 2 MiB segment of small blocks and the 8.125 MiB cuBLAS workspace in a 20 MiB one."""
    allocator = make_allocator(parse_conf(""))
    small = [allocator.malloc(nbytes) for nbytes in (40_448, 512, 4_096, 512, 4)]
    allocator.malloc(8_519_680)
    allocator.free(small[3])
    active, inactive = "active_allocated", "inactive"
    assert blocks_of(allocator) == [
        [(40_448, active), (512, active), (4_096, active), (512, inactive), (512, active), (2_051_072, inactive)],
        [(8_519_680, active), (12_451_840, inactive)],
    ]


@pytest.mark.parametrize(
    ("nbytes", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (33_000_001, 33_000_448, 32 * MIB),
    ],
)
def test_sizes(nbytes: int, rounded: int, segment: int) -> None:
    config = parse_conf("")
    assert round_size(nbytes, config) == rounded
    assert segment_size_for(rounded, config) == segment


def test_power_of_two_divisions() -> None:
    """Steps of a quarter of the power of two below; up to 512 bytes x divisions (the 1200 of the documentation) plain rounding stays."""
    config = parse_conf("roundup_power2_divisions:4")
    assert [round_size(n, config) for n in (1200, 2049, 2048, 5 * MIB, 9 * MIB)] == [1536, 2560, 2048, 5 * MIB, 10 * MIB]


def test_large_block_that_is_not_split_counts_whole() -> None:
    allocator = make_allocator(parse_conf(""))
    block = allocator.malloc(20 * MIB)
    assert block is not None
    allocator.free(block)
    allocator.malloc(int(19.5 * MIB))
    assert allocator.allocated == 20 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = make_allocator(parse_conf(""))
    block = allocator.malloc(32 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    allocator.malloc(32 * MIB, stream=1)
    assert allocator.reserved == 64 * MIB


def test_retry_gives_cached_segments_back() -> None:
    allocator = make_allocator(parse_conf(""), limit_bytes=100 * MIB)
    held, cached = allocator.malloc(40 * MIB), allocator.malloc(40 * MIB)
    assert held is not None and cached is not None
    allocator.free(cached)
    assert allocator.malloc(60 * MIB) is not None
    assert (allocator.retries, allocator.reserved) == (1, 100 * MIB)
    assert allocator.malloc(2 * MIB) is None
    assert (allocator.retries, allocator.allocated) == (2, 100 * MIB)


def test_expandable_segments_move_in_pages() -> None:
    """Large pages of 20 MiB, small ones of 2 MiB; a growing tensor reuses the range it left, which cudaMalloc'ed segments cannot."""
    expandable, native = (make_allocator(parse_conf(conf)) for conf in ("expandable_segments:True", ""))
    for allocator in (expandable, native):
        for size in (30 * MIB, 50 * MIB, 70 * MIB):
            block = allocator.malloc(size)
            assert block is not None
            allocator.free(block)
        allocator.malloc(1000)
    assert expandable.reserved == 80 * MIB + 2 * MIB
    assert native.reserved == (30 + 50 + 70 + 2) * MIB
    expandable.empty_cache()
    assert expandable.reserved == 2 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    allocator = make_allocator(parse_conf("max_split_size_mb:64"))
    block = allocator.malloc(100 * MIB)
    assert block is not None
    allocator.free(block)
    allocator.malloc(30 * MIB)
    assert allocator.reserved == 130 * MIB


REQUEST = st.one_of(
    st.integers(1, 4000), st.integers(1, 2 * MIB), st.integers(MIB, 30 * MIB), st.integers(20 * MIB, 200 * MIB)
)  # fmt: skip
STEPS = st.lists(st.tuples(st.sampled_from("aaaffffe"), REQUEST, st.integers(0, 2)), max_size=60)


def run(conf: str, steps: list[tuple[str, int, int]], *, check: bool = False) -> list[tuple[int, int]]:
    """Run steps ("a"llocate, "f"ree, "e"mpty cache); (allocated, reserved) after each."""
    allocator = make_allocator(parse_conf(conf), limit_bytes=GIB)
    live, history = [], []
    for kind, number, stream in steps:
        if kind == "a":
            block = allocator.malloc(number, stream)
            if block is not None:
                assert block.size >= number
                live.append(block)
        elif kind == "f" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "e":
            allocator.empty_cache()
        history.append((allocator.allocated, allocator.reserved))
        if check:
            assert allocator.allocated == sum(block.size for block in live)
            verify_books(allocator)
    return history


def verify_books(allocator: CachingAllocator) -> None:
    """Nothing overlaps, no two inactive neighbours stay apart, and the sums are what the counters say."""
    end = reserved = allocated = 0
    for segment in allocator.snapshot():
        previous_end, previous_state = segment["address"], ""
        for block in segment["blocks"]:
            assert block["address"] >= max(previous_end, end)
            touching = block["address"] == previous_end
            assert not (touching and block["state"] == previous_state == "inactive")
            previous_end, previous_state = block["address"] + block["size"], block["state"]
        end = previous_end
        reserved += segment["total_size"]
        allocated += segment["allocated_size"]
    assert (allocated, reserved) == (allocator.allocated, allocator.reserved)
    assert allocator.allocated <= allocator.reserved <= allocator.driver.used <= GIB


@settings(max_examples=40, deadline=None)
@given(conf=st.sampled_from(CONFS), steps=STEPS)
def test_books_balance(conf: str, steps: list[tuple[str, int, int]]) -> None:
    run(conf, steps, check=True)


@settings(max_examples=20, deadline=None)
@given(conf=st.sampled_from(CONFS), steps=STEPS)
def test_deterministic(conf: str, steps: list[tuple[str, int, int]]) -> None:
    assert run(conf, steps) == run(conf, steps)


@settings(max_examples=20, deadline=None)
@given(conf=st.sampled_from(["", "expandable_segments:True"]), sizes=st.lists(st.tuples(REQUEST, st.integers(0, 2)), max_size=30))
def test_everything_comes_back(conf: str, sizes: list[tuple[int, int]]) -> None:
    """Free all and empty the cache: nothing allocated, nothing reserved, nothing taken from the driver."""
    allocator = make_allocator(parse_conf(conf))
    blocks = [allocator.malloc(nbytes, stream) for nbytes, stream in sizes]
    for block in blocks:
        assert block is not None
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, allocator.driver.used) == (0, 0, 0)
