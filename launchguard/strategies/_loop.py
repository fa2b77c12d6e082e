"""The training loop that all strategies share: load, prepare, then optimizer steps of one or more micro-batches each."""

from __future__ import annotations

from collections.abc import Sequence

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.job import TRAINER_LOOPS, JobSpec, SavingSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._evaluation import Evaluation
from launchguard.strategies._stream import MicroBatch, MicroBatchHooks, Stream
from launchguard.strategies.optimizer_step import OptimizerStates, numel
from launchguard.units import MIB, dtype_bytes

STEPS = 3  # the first creates optimizer states, the second is ZeRO-3's first with a complete trace, the third is steady
BEFORE_EVALUATION = 2  # evaluation comes between steps: all states exist, and a step follows it
MAX_MICRO_BATCHES = 3  # of one accumulation: the first, one like all in the middle, and the last


class Engine(MicroBatchHooks):
    """One strategy on one rank: the hooks of a micro-batch plus what happens around it. Subclasses allocate on self.stream."""

    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        self.job, self.trace, self.rank, self.device = job, trace, rank, device
        self.stream = Stream()
        self.host: dict[str, int] = {}
        self.trainable = [i for i, p in enumerate(trace.params) if p.requires_grad]
        self.optimizer: OptimizerStates | None = None

    def load(self) -> None:
        """The model as the script loads it onto the device."""

    def prepare(self) -> None:
        """Wrap, shard, initialise the engine."""

    def resume(self) -> None:
        """A checkpoint is loaded before the first step: weights are copied into the parameters that are there from the host, tensor by
        tensor; optimizer states are new tensors (transformers 5.24 trainer.py:_load_optimizer_and_scheduler; several ranks map the file
        to the device, where load_state_dict then takes its tensors as they are: the same bytes)."""
        for states in self.optimizer_states():
            states.load_state_dict()

    def optimizer_states(self) -> Sequence[OptimizerStates]:
        """States that live on the device, by optimizer."""
        return [self.optimizer] if self.optimizer is not None else []

    def begin_micro_batch(self, last: bool) -> None:
        """Before forward; last: gradients are synchronised in this one's backward."""

    def step(self) -> None:
        """Clip, step, and whatever the engine does around it."""

    def zero_grad(self) -> None:
        """After the step."""

    def evaluation_hooks(self) -> MicroBatchHooks:
        """What the framework does in a forward without gradients: by default, what it does in any forward."""
        return self

    def save(self, spec: SavingSpec) -> None:
        """A checkpoint: what is gathered to be written. A plain state_dict refers to what is there, and is copied to the host tensor by
        tensor (torch.save, safetensors)."""

    # shared pieces -------------------------------------------------------------------------------------------------
    def stored_bytes(self, index: int, dtype: str | None = None) -> int:
        """Bytes of a whole parameter in its own dtype, or in `dtype` when it is a floating point one."""
        p = self.trace.params[index]
        if p.storage_bytes is not None:
            return p.storage_bytes
        return p.numel * dtype_bytes(dtype or p.dtype)

    @property
    def mixed(self) -> bool:
        """FSDP mixed precision: forward sees parameters in another dtype than their shards have."""
        return self.job.precision.compute != self.job.precision.storage

    def stored_dtype(self, index: int) -> str:
        """dtype of a parameter's FSDP shard: mixed precision keeps trainable ones in the storage dtype, frozen ones as they were loaded."""
        p = self.trace.params[index]
        if not self.mixed:
            return p.dtype
        return self.job.precision.storage if p.requires_grad else self.job.precision.load

    def alloc_buffers(self) -> None:
        for nbytes in self.trace.buffer_bytes:
            self.stream.alloc(nbytes, Category.PARAMETERS, "buffers")


BROADCAST_BUCKET_BYTES = 250 * MIB
BROADCASTS_IN_FLIGHT = 2


def broadcast_coalesced(stream: Stream, sizes: Sequence[int]) -> None:
    """Broadcast of tensors from rank 0 in flat buckets of 250 MiB, two in flight; a tensor alone in its bucket is sent in place
    (torch 2.13 csrc/distributed/c10d/comm.cpp:broadcast_coalesced, utils/tensor_flatten.h)."""
    buckets, current = [], []
    for nbytes in sizes:
        current.append(nbytes)
        if sum(current) >= BROADCAST_BUCKET_BYTES:
            buckets.append(current)
            current = []
    buckets += [current] if current else []
    in_flight: list[int] = []
    for bucket in buckets:
        if len(in_flight) == BROADCASTS_IN_FLIGHT:
            stream.free(in_flight.pop(0))
        in_flight.append(stream.alloc(sum(bucket), Category.COMMUNICATION, "parameter broadcast") if len(bucket) > 1 else 0)
    stream.free(*in_flight)


class InputFeed:
    """Who holds micro-batches on the device. The HF Trainer fetches all of an optimizer step before its first forward and keeps them until
    it has fetched the next (transformers 5.24 trainer.py:get_batch_samples); Accelerate's loader keeps the current one."""

    def __init__(self, job: JobSpec, micro_batch: MicroBatch, stream: Stream) -> None:
        self.job, self.sizes, self.stream = job, micro_batch.input_bytes, stream
        self.whole_step = job.loop in TRAINER_LOOPS
        self.holds = self.whole_step or job.loop == "accelerate"
        self.held: list[int] = []

    def fetch(self, micro_batches: int) -> None:
        fresh = [self.stream.alloc(n, Category.ACTIVATIONS, "inputs") for _ in range(micro_batches) for n in self.sizes]
        self.stream.free(*self.held)
        self.held = fresh

    def before_step(self) -> None:
        if self.whole_step:
            self.fetch(self.job.gradient_accumulation_steps)

    def before_micro_batch(self) -> None:
        if self.holds and not self.whole_step:
            self.fetch(1)


def run_job(engine: Engine) -> Stream:
    """Everything the rank allocates, from load to the last optimizer step."""
    stream, job = engine.stream, engine.job
    micro_batch = MicroBatch(engine.trace, engine.device.cublas_workspace_bytes)
    feed = InputFeed(job, micro_batch, stream)
    stream.phase("load")
    engine.load()
    stream.phase("prepare")
    engine.prepare()
    if job.resume:
        stream.phase("resume")
        engine.resume()
    count = min(job.gradient_accumulation_steps, MAX_MICRO_BATCHES)
    for n in range(1, STEPS + 1):
        name = str(min(n, 2))  # phases "forward_1" ... of the first optimizer step, "forward_2" ... of all later ones
        feed.before_step()
        for i in range(count):
            feed.before_micro_batch()
            engine.begin_micro_batch(last=i == count - 1)
            micro_batch.run(stream, engine, (f"forward_{name}", f"backward_{name}"), inputs_held=feed.holds)
        stream.phase(f"step_{name}")
        engine.step()
        stream.phase("idle")
        engine.zero_grad()
        if n == BEFORE_EVALUATION:
            evaluate(engine)
            if job.saving is not None:
                stream.phase("save")
                engine.save(job.saving)
    return stream


def evaluate(engine: Engine) -> None:
    """The job's evaluation, if it has one."""
    spec, trace = engine.job.evaluation, engine.trace.evaluation
    if spec is not None and trace is not None:
        Evaluation(engine.stream, spec, trace, engine.job.world_size).run(engine.evaluation_hooks())


def init_optim_state(engine: Engine) -> None:
    """torch.distributed.checkpoint makes the states that it will fill by a step with gradients of zero (torch 2.13
    distributed/checkpoint/state_dict.py:_init_optim_state)."""
    for states in engine.optimizer_states():
        sizes = [numel(t[0]) * dtype_bytes(t[1]) for group in states.groups for t in group] if states.on_device else []
        zeros = [engine.stream.alloc(n, Category.GRADIENTS, "zero gradients") for n in sizes]
        states.step()
        engine.stream.free(*zeros)


def schedule_of(engine: Engine, ranks: tuple[int, ...]) -> RankSchedule:
    return RankSchedule(ranks=ranks, events=tuple(run_job(engine).events))
