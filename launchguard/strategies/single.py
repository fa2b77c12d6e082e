"""One process, nothing sharded: a plain torch loop, Accelerate or the Trainer on one device. Also the base of DDP."""

from __future__ import annotations

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.job import TRAINER_LOOPS, JobSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import Engine, schedule_of
from launchguard.strategies.optimizer_step import OptimizerStates, SteppedTensor, clip_grad_norm, parameter_groups


class SingleEngine(Engine):
    """Parameters, gradients and states in full, in the dtypes that the traced module has."""

    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        super().__init__(job, trace, rank, device)
        self.grads: dict[int, int] = {}

    def load(self) -> None:
        for i in range(len(self.trace.params)):
            self.stream.alloc(self.stored_bytes(i), Category.PARAMETERS, "parameters")
        self.alloc_buffers()

    def prepare(self) -> None:
        self.optimizer = OptimizerStates(self.stream, self.job.optimizer, self.parameter_groups())

    def parameter_groups(self) -> list[list[SteppedTensor]]:
        params, modules, trainer = self.trace.params, self.trace.modules, self.job.loop in TRAINER_LOOPS
        embedding = [trainer and modules[params[i].module].cls == "Embedding" for i in self.trainable]
        return parameter_groups(
            [SteppedTensor(params[i].shape, params[i].dtype, e) for i, e in zip(self.trainable, embedding)], self.job.loop
        )

    def grad(self, param: int, handle: int) -> None:
        if param in self.grads:
            self.stream.free(handle)  # accumulated in place into the gradient that is there
        else:
            self.grads[param] = handle

    def step(self) -> None:
        if self.job.max_grad_norm is not None:
            clip_grad_norm(self.stream, [self.trace.params[i].numel for i in self.trainable])
        assert self.optimizer is not None
        self.optimizer.step()

    def zero_grad(self) -> None:
        if self.job.zero_grad_set_to_none:
            self.stream.free(*self.grads.values())
            self.grads.clear()


def representatives(job: JobSpec, trace: StepTrace) -> list[tuple[int, ...]]:
    """Every process does the same on its own device."""
    return [tuple(range(job.world_size))]


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    return schedule_of(SingleEngine(job, trace, ranks[0], device), ranks)
