"""Which ZeRO-3 parameters are whole on the device, and when: a re-implementation of
zero/partitioned_param_coordinator.py:PartitionedParameterCoordinator (deepspeed 0.19.8) over module and parameter indexes.

The first forward and backward record the order of modules and gather module by module; from then on the complete order lets the
prefetcher run ahead of every module call, and a parameter stays when its next use is near.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

NOT_AVAILABLE, INFLIGHT, AVAILABLE = range(3)  # partition_parameters.py:ZeroParamStatus


class Flight:
    """One all-gather under way. flats: handles of the buffers that its parameters share, kept until all of them have been waited for."""

    __slots__ = ("params", "flats", "waiting", "done")

    def __init__(self, params: Sequence[int], flats: Sequence[int]) -> None:
        self.params, self.flats, self.waiting, self.done = params, flats, len(params), False


class Memory(Protocol):
    """What a gather, a wait and a release allocate; the coordinator only decides."""

    def gather(self, params: Sequence[int]) -> Flight: ...

    def arrive(self, flight: Flight) -> None: ...

    def land(self, flight: Flight) -> None: ...

    def release(self, param: int) -> None: ...


class Coordinator:
    """params_of: parameters that each module fetches, in ds_id order; numel, persistent, trainable: by parameter.

    prefetch, max_live, max_reuse: elements; the stage3_* settings.
    """

    def __init__(
        self, memory: Memory, params_of: Sequence[Sequence[int]], numel: Sequence[int], persistent: Sequence[bool],
        trainable: Sequence[bool], prefetch: int, max_live: int, max_reuse: int,
    ) -> None:  # fmt: skip
        self.memory, self.params_of, self.numel = memory, params_of, numel
        self.persistent, self.trainable = persistent, trainable
        self.prefetch, self.max_live, self.max_reuse = prefetch, max_live, max_reuse
        self.status = [NOT_AVAILABLE] * len(numel)
        self.inflight: dict[int, Flight] = {}
        self.active: list[set[int]] = [set() for _ in numel]
        self.available = 0
        self.recording = self.complete = False
        self.step = 0
        self.order: list[int] = []
        self.queue: list[tuple[int, int]] = []  # (parameter, step at which it is used), the whole trace
        self.head = 0
        self.fetched_for: dict[int, int] = {}
        self.in_backward: dict[int, None] = {}
        self.recomputed: dict[int, set[int]] = {}
        self._releases: dict[tuple[int, int], frozenset[int]] = {}
        self._traversed: list[int] = []
        self._uses: dict[int, list[int]] = {}

    # a forward begins ----------------------------------------------------------------------------------------------
    def reset_step(self) -> None:
        """reset_step, from the root's forward pre-hook."""
        for param, flight in list(self.inflight.items()):
            self._wait(param, flight)
            self._release_param(param)
        if self.recording:
            self._freeze()
        elif not self.complete:
            self.recording = True
        self.head, self.fetched_for, self.step, self.available = 0, {}, 0, 0

    def _freeze(self) -> None:
        self.recording, self.complete = False, True
        for step, module in enumerate(self.order):
            for param in self.params_of[module]:
                self.queue.append((param, step))
                self._uses.setdefault(param, []).append(step)
        sizes = [sum(self.numel[p] for p in self.params_of[m]) for m in self.order]
        self._traversed = [0, *accumulate(sizes)]

    # fetch ---------------------------------------------------------------------------------------------------------
    def fetch(self, module: int, forward: bool, recompute: bool) -> None:
        """fetch_sub_module: gather what the module needs, wait for it, then prefetch."""
        if self.recording:
            self.order.append(module)
        if not forward:
            self.in_backward[module] = None
        params = self.params_of[module]
        self._gather([p for p in params if self.status[p] == NOT_AVAILABLE])
        for param in params:
            self.active[param].add(module)
            if recompute and self.in_backward and not self.trainable[param]:
                self.recomputed.setdefault(next(reversed(self.in_backward)), set()).add(param)
            flight = self.inflight.get(param)
            if flight is not None:
                self._wait(param, flight)
        if self.complete:
            self._skip(params)
            if self.prefetch > 0:
                self._prefetch()
        self.step += 1

    def _gather(self, params: list[int]) -> None:
        if not params:
            return
        self.available += sum(self.numel[p] for p in params)
        flight = self.memory.gather(params)
        for p in params:
            self.status[p] = INFLIGHT
            self.inflight[p] = flight

    def _wait(self, param: int, flight: Flight) -> None:
        """AllGatherCoalescedHandle.wait serves the whole batch; the batch's buffer goes with the last reference to it."""
        del self.inflight[param]
        if not flight.done:
            flight.done = True
            self.memory.arrive(flight)
            for p in flight.params:
                self.status[p] = AVAILABLE
        flight.waiting -= 1
        if flight.waiting == 0:
            self.memory.land(flight)

    def _skip(self, params: Sequence[int]) -> None:
        """Take what this module needs off the prefetch queue."""
        left = len({p for p in params if self.fetched_for.get(p, -1) < self.step})
        seen: set[int] = set()
        while self.head < len(self.queue) and len(seen) < left:
            param, used = self.queue[self.head]
            self.head += 1
            self.fetched_for[param] = used
            seen.add(param)

    def _prefetch(self) -> None:
        """Queue up to a bucket of elements that are not there yet; max_live limits this, and nothing else."""
        limit = min(self.max_live - self.available, self.prefetch)
        wanted: list[int] = []
        elements = 0
        while self.head < len(self.queue) and elements < limit:
            param, used = self.queue[self.head]
            self.head += 1
            if used > self.fetched_for.get(param, -1):
                self.fetched_for[param] = used
            if self.status[param] == NOT_AVAILABLE and param not in wanted:
                wanted.append(param)
                elements += self.numel[param]
        self._gather(sorted(wanted))

    # release -------------------------------------------------------------------------------------------------------
    def release(self, module: int, forward: bool) -> None:
        """release_sub_module."""
        params: Sequence[int] = self.params_of[module]
        leaving = self._leaving(module) if self.complete else frozenset(params)
        if not forward:
            extra = self.recomputed.pop(module, None)
            self.in_backward.pop(module, None)
            if extra:
                leaving |= {p for p in extra if not self.persistent[p]}
                params = [*params, *(p for p in extra if p not in params)]
        for param in params:
            self.active[param].discard(module)
            if param in leaving:
                self._release_param(param)

    def _leaving(self, module: int) -> frozenset[int]:
        """__params_to_release, cached for good by module and step as the lru_cache there does: not persistent, not skipped by the
        prefetcher, and not used again within max_reuse elements of traversed parameters."""
        key = (module, self.step)
        found = self._releases.get(key)
        if found is None:
            leaving = [p for p in self.params_of[module] if not self.persistent[p]]
            leaving = [p for p in leaving if self.fetched_for.get(p, -1) <= self.step and not self._near(p)]
            found = self._releases[key] = frozenset(leaving)
        return found

    def _near(self, param: int) -> bool:
        uses = self._uses.get(param, [])
        k = bisect_left(uses, self.step)
        if k == len(uses):
            return False
        return self._traversed[uses[k]] - self._traversed[min(self.step, len(self.order))] < self.max_reuse

    def _release_param(self, param: int) -> None:
        if self.status[param] == AVAILABLE and not self.active[param]:
            self.memory.release(param)
            self.status[param] = NOT_AVAILABLE
            self.available -= self.numel[param]

    def release_leftovers(self) -> None:
        """release_backward_leftovers: modules whose inputs needed no gradient never saw their post-backward hook."""
        while self.in_backward:
            module, _ = self.in_backward.popitem()
            for param in [*self.params_of[module], *self.recomputed.pop(module, ())]:
                self.active[param].discard(module)
                if not self.persistent[param]:
                    self._release_param(param)

    def release_all(self) -> None:
        """release_and_reset_all, at the beginning of a step."""
        for param in range(len(self.numel)):
            flight = self.inflight.get(param)
            if flight is not None:
                self._wait(param, flight)
            self.active[param].clear()
            self._release_param(param)
