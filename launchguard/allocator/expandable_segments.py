"""The caching allocator with expandable_segments:True: one virtual range per pool and stream, memory mapped behind it page by page.

A segment grows instead of being joined by another, so that reserved moves in pages (2 MiB small, large_segment_size large) and only the
tail of the last page is waste.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from launchguard.allocator.caching_allocator import (
    INACTIVE,
    MIN_BLOCK_SIZE,
    SMALL_BUFFER,
    UNMAPPED,
    AddressRange,
    Block,
    CachingAllocator,
    Pool,
    absorb_next,
    split_off,
)
from launchguard.units import round_up

_UNLIMITED = 1 << 46  # bytes of address space when the device's size is unknown


class ExpandableSegmentsAllocator(CachingAllocator):
    """Differs from the native allocator in which block fits best, where new memory appears, and what can be given back."""

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """The smallest block that is large enough; among equals in order, one that has less room to grow behind it."""
        free = pool.free
        i = bisect_left(free, (size,))
        if self._collects and not pool.small:
            self.searches += 1
        if i == len(free):
            return None
        block = free[i][2]
        while i + 1 < len(free) and _reach(free[i + 1][2]) < _reach(block):
            i += 1
            block = free[i][2]
        if self._keeps_oversize and not self._may_take(block, size):
            return None
        del free[i]
        return block

    def _splits(self, pool: Pool, rest: int, size: int) -> bool:
        return rest >= MIN_BLOCK_SIZE

    # ------------------------------------------------------------ mapping
    def _new_segment(self, pool: Pool, size: int, segment_size: int) -> Block | None:
        block = self._find_room(pool, size)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.next
            assert unmapped is not None  # _find_room has counted the bytes
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None  # what was mapped until here stays, inactive
        free = pool.free
        del free[bisect_left(free, (block.size, block.address))]
        return block

    def _find_room(self, pool: Pool, size: int) -> Block:
        """The lowest inactive or unmapped block from which `size` bytes follow without an active one; in a new range if there is none."""
        for _, block in pool.unmapped:
            before = block.prev
            if before is not None and before.state == INACTIVE:
                block = before
            room, following = 0, block
            while room < size and following is not None and following.state in (INACTIVE, UNMAPPED):
                room += following.size
                following = following.next  # type: ignore[assignment]  # None ends the loop
            if room >= size:
                return block
        return self._new_range(pool)

    def _new_range(self, pool: Pool) -> Block:
        page = SMALL_BUFFER if pool.small else self.config.large_segment_size
        total = self.driver.total if self.driver.total is not None else _UNLIMITED
        size = round_up(total + total // 8, page)
        place = AddressRange(self.driver.reserve_address(size), size, page)
        block = Block(pool, place.address, size, None, None, place)
        block.state = UNMAPPED
        self._segments[place.address] = block
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map pages behind the first `size` bytes of an unmapped block, which joins its inactive neighbours."""
        assert block.range is not None
        size = round_up(size, block.range.page)
        if not self.driver.take(size):
            return False
        pool = block.pool
        unmapped = pool.unmapped
        del unmapped[bisect_left(unmapped, (block.address,))]
        if size < block.size:
            rest = split_off(block, size)
            rest.state = UNMAPPED
            insort(unmapped, (rest.address, rest))
        self._make_inactive(block)
        self.reserved += size
        return True

    # ------------------------------------------------------------ giving back to the driver
    def _release_pool(self, pool: Pool) -> None:
        for _, _, block in pool.free[:]:
            self._unmap(block)

    def _release_available(self, pool: Pool, size: int) -> bool:
        return False  # torch skips expandable blocks here

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside an inactive block; a range that is unmapped from end to end is forgotten."""
        place = block.range
        assert place is not None
        start = place.address + round_up(block.address - place.address, place.page)
        end = place.address + (block.address + block.size - place.address) // place.page * place.page
        if start >= end:
            return
        pool = block.pool
        free, unmapped = pool.free, pool.unmapped
        del free[bisect_left(free, (block.size, block.address))]
        if block.address + block.size > end:
            rest = split_off(block, end - block.address)
            insort(free, (rest.size, rest.address, rest))
        if block.address < start:
            rest = split_off(block, start - block.address)
            insort(free, (block.size, block.address, block))
            block = rest
        block.state = UNMAPPED
        self.driver.give_back(end - start)
        self.reserved -= end - start
        after = block.next
        if after is not None and after.state == UNMAPPED:
            del unmapped[bisect_left(unmapped, (after.address,))]
            absorb_next(block, after)
        before = block.prev
        if before is not None and before.state == UNMAPPED:
            absorb_next(before, block)  # `before` is already listed, under the same address
            block = before
        else:
            insort(unmapped, (block.address, block))
        if block.size == place.size:
            del unmapped[bisect_left(unmapped, (block.address,))]
            del self._segments[place.address]


def _reach(block: Block) -> int:
    """Bytes of a block and of the unmapped one behind it."""
    after = block.next
    return block.size + after.size if after is not None and after.state == UNMAPPED else block.size
