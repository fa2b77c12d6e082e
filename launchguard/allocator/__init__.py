"""The device allocator: a schedule of allocations in, a timeline of allocated and reserved bytes out. Knows no domain."""

from launchguard.allocator.caching_allocator import CachingAllocator, Driver
from launchguard.allocator.config import AllocatorConfig, alloc_conf, parse_conf
from launchguard.allocator.replay import make_allocator, replay, smallest_limit

__all__ = ["AllocatorConfig", "CachingAllocator", "Driver", "alloc_conf", "make_allocator", "parse_conf", "replay", "smallest_limit"]
