"""torch's native CUDA caching allocator, as book-keeping: same rounding, best fit, splitting, merging and release, no memory.

It knows segments, blocks and streams, and has never heard of a tensor. The algorithm was read in c10/cuda/CUDACachingAllocator.cpp and
compared with the binaries of torch 2.13.0 and 2.14.1 over 300,000 random operations without a difference. Left out, because no event
asks for them: record_stream, graph captures and private pools.

This is the inner loop of every prediction: __slots__, plain lists kept sorted by bisect, no objects per call but the block itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, NamedTuple

from launchguard.allocator.config import AllocatorConfig
from launchguard.units import MIB

# c10/core/AllocatorConfig.h
MIN_BLOCK_SIZE = 512  # every request is rounded up to a multiple
SMALL_SIZE = 1 * MIB  # up to here from the small pool
SMALL_BUFFER = 2 * MIB  # segment of the small pool
MIN_LARGE_ALLOC = 10 * MIB  # from here on a segment of its own
ROUND_LARGE = 2 * MIB  # and that rounded to a multiple of this

DRIVER_GRANULE = 2 * MIB  # cudaMalloc hands out physical pages of this size

INACTIVE, ACTIVE, UNMAPPED = 0, 1, 2  # states of a block


class Driver:
    """The device's memory below the allocator: bytes it can give, and virtual addresses that are never given twice."""

    __slots__ = ("next_address", "total", "used")

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.used = 0
        self.next_address = 0x7000000000

    def reserve_address(self, size: int) -> int:
        """Address of a virtual range, without memory behind it."""
        address = self.next_address
        self.next_address = address + -(-size // DRIVER_GRANULE) * DRIVER_GRANULE
        return address

    def take(self, size: int) -> bool:
        """Physical bytes, in whole granules; False when there are not so many left."""
        size = -(-size // DRIVER_GRANULE) * DRIVER_GRANULE
        if self.total is not None and self.used + size > self.total:
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        self.used -= -(-size // DRIVER_GRANULE) * DRIVER_GRANULE


class Pool:
    """Inactive blocks of one stream, small or large. Streams never share blocks, so each has its own.

    free: (size, address, block), sorted: best fit is one bisect, ties go to the lowest address. unmapped: (address, block), sorted.
    """

    __slots__ = ("free", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int) -> None:
        self.small = small
        self.stream = stream
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []


class AddressRange(NamedTuple):
    """Virtual addresses of an expandable segment: memory is mapped behind them page by page."""

    address: int
    size: int
    page: int


class Block:
    """A part of a segment; prev and next are its neighbours by address inside that segment."""

    __slots__ = ("address", "born", "next", "pool", "prev", "range", "size", "state")

    def __init__(
        self, pool: Pool, address: int, size: int, prev: Block | None, next: Block | None, range: AddressRange | None = None
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.prev = prev
        self.next = next
        self.state = INACTIVE
        self.range = range  # of the expandable segment it lies in; None in a cudaMalloc'ed one
        self.born = 0  # searches of the large pool when it became inactive: its age for garbage collection


class CachingAllocator:
    """One device's allocator with cudaMalloc'ed segments.

    allocated: bytes of active blocks (torch.cuda.memory_allocated); reserved: bytes of segments (torch.cuda.memory_reserved);
    retries: times everything cached was given back to the driver to make room (num_alloc_retries).
    total_bytes: the device's, of which per_process_memory_fraction is a share.
    """

    def __init__(self, config: AllocatorConfig, driver: Driver, total_bytes: int | None = None) -> None:
        self.config = config
        self.driver = driver
        self.allocated = 0
        self.reserved = 0
        self.retries = 0
        self.searches = 0
        self.limit: int | None = None
        total = total_bytes if total_bytes is not None else driver.total
        if config.per_process_memory_fraction < 1.0 and total is not None:
            self.limit = int(config.per_process_memory_fraction * total)
        self._collects = self.limit is not None and config.garbage_collection_threshold > 0
        self._rounds = any(config.roundup_divisions)
        self._keeps_oversize = config.max_split_size is not None
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._segments: dict[int, Block] = {}  # by address: the first block, which stays the same object while the segment lives

    # ------------------------------------------------------------ what events ask for
    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block of at least nbytes (> 0), or None: out of memory, everything cached already given back."""
        size = round_size(nbytes, self.config) if self._rounds else (nbytes + 511) & -512
        pools = self._small if size <= SMALL_SIZE else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = Pool(size <= SMALL_SIZE, stream)
        block = self._best_fit(pool, size)
        if block is None:
            block = self._grow(pool, size)
            if block is None:
                return None
        if self._splits(pool, block.size - size, size):
            rest = split_off(block, size)
            rest.born = self.searches
            insort(pool.free, (rest.size, rest.address, rest))
        block.state = ACTIVE
        self.allocated += block.size  # a large block that is not split counts whole
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with its inactive neighbours."""
        self.allocated -= block.size
        self._make_inactive(block)

    def _make_inactive(self, block: Block) -> None:
        """Merge a block with its inactive neighbours and put it into its pool."""
        free = block.pool.free
        block.state = INACTIVE
        after = block.next
        if after is not None and after.state == INACTIVE:
            del free[bisect_left(free, (after.size, after.address))]
            absorb_next(block, after)
        before = block.prev
        if before is not None and before.state == INACTIVE:
            del free[bisect_left(free, (before.size, before.address))]
            absorb_next(before, block)
            block = before
        block.born = self.searches
        insort(free, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """Give every wholly inactive segment back to the driver (torch.cuda.empty_cache)."""
        for pools in (self._large, self._small):
            for pool in pools.values():
                self._release_pool(pool)

    def segment_size(self, nbytes: int) -> int:
        """Bytes that a request of nbytes asks the driver for when nothing cached fits: the number in torch's "Tried to allocate"."""
        return segment_size_for(round_size(nbytes, self.config), self.config)

    def snapshot(self) -> list[dict[str, Any]]:
        """Segments and blocks in the form of torch.cuda.memory_snapshot(), by address."""
        segments = []
        for address in sorted(self._segments):
            blocks = [*_chain(self._segments[address])]
            mapped = [block for block in blocks if block.state != UNMAPPED]
            pool = blocks[0].pool
            segments.append({
                "address": address,
                "total_size": sum(block.size for block in mapped),
                "stream": pool.stream,
                "segment_type": "small" if pool.small else "large",
                "allocated_size": sum(block.size for block in mapped if block.state == ACTIVE),
                "is_expandable": blocks[0].range is not None,
                "blocks": [
                    {"address": block.address, "size": block.size, "state": "active_allocated" if block.state == ACTIVE else "inactive"}
                    for block in mapped
                ],
            })  # fmt: skip
        return segments

    # ------------------------------------------------------------ finding and making blocks
    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        i = bisect_left(free, (size,))
        if self._collects and not pool.small:
            self.searches += 1
        if i == len(free):
            return None
        block = free[i][2]
        if self._keeps_oversize and not self._may_take(block, size):
            return None
        del free[i]
        return block

    def _may_take(self, block: Block, size: int) -> bool:
        """Rules of max_split_size_mb: an oversize block serves only requests that nearly fill it."""
        limit = self.config.max_split_size
        if limit is None:
            return True
        if size < limit:
            return block.size < limit
        return block.size < size + self.config.max_non_split_rounding

    def _splits(self, pool: Pool, rest: int, size: int) -> bool:
        if pool.small:
            return rest >= MIN_BLOCK_SIZE
        return rest > SMALL_SIZE and (self.config.max_split_size is None or size < self.config.max_split_size)

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A block from the driver: at once, after releasing a large enough cached block, after releasing everything."""
        if self._collects:
            self._collect_garbage()
        segment_size = segment_size_for(size, self.config)
        block = self._new_block(pool, size, segment_size)
        if block is None and self._release_available(pool, size):
            block = self._new_block(pool, size, segment_size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size, segment_size)
        return block

    def _new_block(self, pool: Pool, size: int, segment_size: int) -> Block | None:
        if self.limit is not None and self.reserved + segment_size > self.limit:
            return None
        return self._new_segment(pool, size, segment_size)

    def _new_segment(self, pool: Pool, size: int, segment_size: int) -> Block | None:
        if not self.driver.take(segment_size):
            return None
        address = self.driver.reserve_address(segment_size)
        self.reserved += segment_size
        block = Block(pool, address, segment_size, None, None)
        self._segments[address] = block
        return block

    # ------------------------------------------------------------ giving back to the driver
    def _release_pool(self, pool: Pool) -> None:
        for _, _, block in pool.free[:]:
            if block.prev is None and block.next is None:
                self._release_segment(block)

    def _release_segment(self, block: Block) -> None:
        """Free a segment that is one inactive block."""
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]
        del self._segments[block.address]
        self.driver.give_back(block.size)
        self.reserved -= block.size

    def _release_available(self, pool: Pool, size: int) -> bool:
        """With max_split_size_mb: release an oversize cached block that could not be taken, or several that are large enough together."""
        limit = self.config.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        free = pool.free
        i = bisect_left(free, (wanted,))
        if i < len(free):
            self._release_segment(free[i][2])
            return True
        released = 0
        while i > 0 and released < wanted:
            i -= 1
            block = free[i][2]
            if block.size < limit:
                break
            released += block.size
            self._release_segment(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above threshold * limit: release unsplit large blocks that are older than the average, round by round."""
        assert self.limit is not None
        threshold = int(self.config.garbage_collection_threshold * self.limit)
        target, reclaimed = self.reserved - threshold, 0
        if target <= 0:
            return
        free = [block for pool in self._large.values() for _, _, block in pool.free]
        candidates = [block for block in free if block.range is None and block.prev is None and block.next is None]
        while reclaimed < target and candidates:
            mean_age = sum(self.searches - block.born for block in candidates) / len(candidates)
            old = [block for block in candidates if self.searches - block.born >= mean_age]
            for block in old:
                reclaimed += block.size
                self._release_segment(block)
            candidates = [block for block in candidates if self.searches - block.born < mean_age]


# ---------------------------------------------------------------- sizes
def round_size(nbytes: int, config: AllocatorConfig) -> int:
    """Bytes of the block that a request of nbytes asks for: a multiple of 512, or of a power of two's division."""
    if nbytes < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    divisions = _divisions(nbytes, config)
    if divisions <= 1 or nbytes <= MIN_BLOCK_SIZE * divisions:
        return -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
    step = (1 << (nbytes.bit_length() - 1)) // divisions
    return -(-nbytes // step) * step


def _divisions(nbytes: int, config: AllocatorConfig) -> int:
    intervals = config.roundup_divisions
    if not intervals:
        return 0
    return intervals[min(max(nbytes.bit_length() - 1 - 20, 0), len(intervals) - 1)]


def segment_size_for(size: int, config: AllocatorConfig) -> int:
    """Bytes of a new segment for a block of `size`."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE


# ---------------------------------------------------------------- chains of blocks
def _chain(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.next


def absorb_next(block: Block, after: Block) -> None:
    """Merge the right neighbour into a block; `after` is no block any more."""
    block.size += after.size
    follower = after.next
    block.next = follower
    if follower is not None:
        follower.prev = block


def split_off(block: Block, size: int) -> Block:
    """Shrink a block to its first `size` bytes; the rest becomes a block of its own, inactive and in no list."""
    after = block.next
    rest = Block(block.pool, block.address + size, block.size - size, block, after, block.range)
    if after is not None:
        after.prev = rest
    block.next = rest
    block.size = size
    return rest
