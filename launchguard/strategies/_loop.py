"""The training loop that all strategies share: load, prepare, then optimizer steps of one or more micro-batches each."""

from __future__ import annotations

from collections.abc import Sequence

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.job import TRAINER_LOOPS, JobSpec, SavingSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._evaluation import Evaluation
from launchguard.strategies._generation import generate
from launchguard.strategies._stream import MicroBatch, MicroBatchHooks, Stream
from launchguard.strategies.optimizer_step import OptimizerStates, numel
from launchguard.units import MIB, ceil_div, dtype_bytes

STEPS = 3  # the first creates optimizer states, the second is ZeRO-3's first with a complete trace, the third is steady
BEFORE_EVALUATION = 2  # evaluation comes between steps: all states exist, and a step follows it
MAX_MICRO_BATCHES = 3  # of one accumulation: the first, one like all in the middle, and the last


class Engine(MicroBatchHooks):
    """One strategy on one rank: the hooks of a micro-batch plus what happens around it. Subclasses allocate on self.stream.
    steps: optimizer steps until nothing new appears; batch_share: micro-batches that a loop holds on this device instead of one (0: none);
    loss_outlives_step: the loss, and what goes with its graph, is alive while the optimizer steps.
    """

    steps = STEPS
    batch_share = 1
    loss_outlives_step = False

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

    def gather_state_dict(self, where: str) -> None:
        """The script makes a whole state dict; where: as in SavingSpec. What is not sharded is referred to."""

    def whole_model(self) -> Sequence[int]:
        """Handles of what is gathered to have every parameter whole on the device."""
        return []

    def release_whole(self, handles: Sequence[int]) -> None:
        """The end of whole_model."""
        self.stream.free(*handles)

    def synced_tensors(self) -> list[int]:
        """Bytes of the tensors that are gathered one after the other for an engine beside the training; none of a whole model."""
        return []

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

    def load_reference(self) -> None:
        """The frozen second model of a preference trainer, prepared before training starts: whole under DDP and ZeRO 0-2, where it gets an
        engine of stage 0; sharded as the trained one under ZeRO-3 and FSDP (trl 1.16 models/utils.py:prepare_deepspeed, prepare_fsdp)."""
        job, zero = self.job, self.job.zero
        dtype = zero.dtype if job.strategy == "zero" and zero is not None else job.precision.load
        sharded = job.strategy.startswith("fsdp") or zero is not None and job.strategy == "zero" and zero.stage == 3
        whole = sum(self.stored_bytes(i, dtype) for i in range(len(self.trace.params)))
        self.stream.alloc(ceil_div(whole, job.world_size) if sharded else whole, Category.PARAMETERS, "reference model")

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

    def __init__(self, job: JobSpec, micro_batch: MicroBatch, stream: Stream, share: int) -> None:
        self.job, self.sizes, self.stream = job, [n * share for n in micro_batch.input_bytes], stream
        self.whole_step = job.loop in TRAINER_LOOPS
        self.holds = share > 0 and (self.whole_step or job.loop == "accelerate")
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
    micro_batch, first = micro_batches(engine)
    stream.phase("load")
    engine.load()
    if job.reference:
        engine.load_reference()
    feed = InputFeed(job, micro_batch, stream, engine.batch_share)
    stream.phase("prepare")
    engine.prepare()
    if job.resume:
        stream.phase("resume")
        engine.resume()
    count = min(job.gradient_accumulation_steps, MAX_MICRO_BATCHES)
    held: list[int] = []  # by the loop's variables, of the last micro-batch
    keeps_outputs = job.outputs_alive_in_backward and not job.outputs_deleted
    for n in range(1, engine.steps + 1):
        name = str(min(n, 2))  # phases "forward_1" ... of the first optimizer step, "forward_2" ... of all later ones
        feed.before_step()
        for i in range(count):
            feed.before_micro_batch()
            engine.begin_micro_batch(last=i == count - 1)
            (first if n == 1 and i == 0 else micro_batch).run(
                stream, engine, (f"forward_{name}", f"backward_{name}"), inputs_held=feed.holds,
                held=held if keeps_outputs or (engine.loss_outlives_step and i == count - 1) else None,
            )  # fmt: skip
        stream.phase(f"step_{name}")
        engine.step()
        stream.phase("idle")
        if not keeps_outputs:
            stream.free(*held)
            held.clear()
        engine.zero_grad()
        if n == BEFORE_EVALUATION:
            evaluate(engine)
            if job.generation is not None:
                generate(stream, job.generation, engine)
            if job.saving is not None:
                stream.phase("save")
                save(engine, job.saving)
    return stream


def save(engine: Engine, spec: SavingSpec) -> None:
    """What the library writes, then what the script gathers by itself."""
    if spec.library:
        engine.save(spec)
    if spec.script is not None:
        engine.gather_state_dict(spec.script)


def micro_batches(engine: Engine) -> tuple[MicroBatch, MicroBatch]:
    """The micro-batch of every step, and the first of all (mostly the same), which warms cuBLAS up."""
    identities = type(engine).backward_exit is not MicroBatchHooks.backward_exit
    workspace, first = engine.device.cublas_workspace_bytes, engine.trace.first
    if first is None:
        one = MicroBatch(engine.trace, workspace, identities)
        return one, one
    return MicroBatch(engine.trace, 0, identities), MicroBatch(first, workspace, identities)


def evaluate(engine: Engine) -> None:
    """The job's evaluation, if it has one; not on a card whose every byte the first card holds, too."""
    spec, trace = engine.job.evaluation, engine.trace.evaluation
    if spec is not None and trace is not None and engine.batch_share:  # a device that holds no batch is one of DataParallel's replicas
        Evaluation(engine.stream, spec, trace, engine.job.world_size, engine.batch_share).run(engine.evaluation_hooks())


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
