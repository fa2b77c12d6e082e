"""The training loop that all strategies share: load, prepare, then optimizer steps of one or more micro-batches each."""

from __future__ import annotations

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._stream import MicroBatch, MicroBatchHooks, Stream
from launchguard.units import dtype_bytes

STEPS = 3  # the first creates optimizer states, the second is ZeRO-3's first with a complete trace, the third is steady
MAX_MICRO_BATCHES = 3  # of one accumulation: the first, one like all in the middle, and the last


class Engine(MicroBatchHooks):
    """One strategy on one rank: the hooks of a micro-batch plus what happens around it. Subclasses allocate on self.stream."""

    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        self.job, self.trace, self.rank, self.device = job, trace, rank, device
        self.stream = Stream()
        self.host: dict[str, int] = {}
        self.trainable = [i for i, p in enumerate(trace.params) if p.requires_grad]

    def load(self) -> None:
        """The model as the script loads it onto the device."""

    def prepare(self) -> None:
        """Wrap, shard, initialise the engine."""

    def begin_micro_batch(self, last: bool) -> None:
        """Before forward; last: gradients are synchronised in this one's backward."""

    def step(self) -> None:
        """Clip, step, and whatever the engine does around it."""

    def zero_grad(self) -> None:
        """After the step."""

    # shared pieces -------------------------------------------------------------------------------------------------
    def stored_bytes(self, index: int, dtype: str | None = None) -> int:
        """Bytes of a whole parameter in its own dtype, or in `dtype` when it is a floating point one."""
        p = self.trace.params[index]
        if p.storage_bytes is not None:
            return p.storage_bytes
        return p.numel * dtype_bytes(dtype or p.dtype)

    def alloc_buffers(self) -> None:
        for nbytes in self.trace.buffer_bytes:
            self.stream.alloc(nbytes, Category.PARAMETERS, "buffers")


def run_job(engine: Engine) -> Stream:
    """Everything the rank allocates, from load to the last optimizer step."""
    stream, job = engine.stream, engine.job
    micro_batch = MicroBatch(engine.trace, engine.device.cublas_workspace_bytes)
    stream.phase("load")
    engine.load()
    stream.phase("prepare")
    engine.prepare()
    count = min(job.gradient_accumulation_steps, MAX_MICRO_BATCHES)
    for n in range(1, STEPS + 1):
        name = str(min(n, 2))  # phases "forward_1" ... of the first optimizer step, "forward_2" ... of all later ones
        for i in range(count):
            engine.begin_micro_batch(last=i == count - 1)
            micro_batch.run(stream, engine, (f"forward_{name}", f"backward_{name}"))
        stream.phase(f"step_{name}")
        engine.step()
        stream.phase("idle")
        engine.zero_grad()
    return stream


def schedule_of(engine: Engine, ranks: tuple[int, ...]) -> RankSchedule:
    return RankSchedule(ranks=ranks, events=tuple(run_job(engine).events))
