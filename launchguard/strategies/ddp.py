"""torch DistributedDataParallel: the single-device picture plus flat gradient buckets.

Read in torch 2.13 torch/nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp; measured with 2 ranks: the buckets total all
trainable gradients and live from construction to the end; `.grad` is a separate tensor unless gradient_as_bucket_view.
"""

from __future__ import annotations

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.job import DdpSpec, JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import schedule_of
from launchguard.strategies.single import SingleEngine, representatives
from launchguard.units import MIB, dtype_bytes

__all__ = ["DdpEngine", "representatives", "schedule"]

FIRST_BUCKET_BYTES = 1 * MIB  # distributed.py: _DEFAULT_FIRST_BUCKET_BYTES, before bucket_cap_mb takes over
BUCKET_BYTES = 25 * MIB
BROADCAST_BYTES = 250 * MIB  # parameters are broadcast in coalesced chunks at construction


class DdpEngine(SingleEngine):
    @property
    def spec(self) -> DdpSpec:
        return self.job.ddp or DdpSpec()

    def prepare(self) -> None:
        self._broadcast()
        for nbytes in self.buckets():
            self.stream.alloc(nbytes, Category.GRADIENTS, "DDP buckets")
        super().prepare()

    def _broadcast(self) -> None:
        chunk = 0
        for i in range(len(self.trace.params)):
            chunk = min(chunk + self.stored_bytes(i), BROADCAST_BYTES)
        self.stream.touch(chunk, Category.COMMUNICATION, "DDP parameter broadcast")

    def buckets(self) -> list[int]:
        """Bucket sizes in bytes: parameters in reverse order, per dtype, closed when the cap is reached."""
        sizes: list[int] = []
        filling: dict[str, int] = {}
        for i in reversed(self.trainable):
            p = self.trace.params[i]
            filling[p.dtype] = filling.get(p.dtype, 0) + p.numel * dtype_bytes(p.dtype)
            if filling[p.dtype] >= (BUCKET_BYTES if sizes else FIRST_BUCKET_BYTES):
                sizes.append(filling.pop(p.dtype))
        return sizes + list(filling.values())

    def grad(self, param: int, handle: int) -> None:
        if self.spec.gradient_as_bucket_view:
            self.stream.free(handle)  # copied into the bucket; .grad is a view of it
        else:
            super().grad(param, handle)


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    return schedule_of(DdpEngine(job, trace, ranks[0], device), ranks)
