"""4-bit weights under ZeRO-3, which outlive their release: the node of a product keeps a view of the gathered weight as an attribute, which
backward does not clear, so its storage stays as long as the graph (bitsandbytes 0.50.2 autograd/_functions.py:MatMul4Bit.forward,
ctx.tensors). FSDP shrinks the storage itself, views or not. Held against the engine on a virtual card in tests/rehearsal.
"""

from __future__ import annotations

from collections.abc import Mapping

from launchguard.events import StepTrace, TraceOp
from launchguard.job import TRAINER_LOOPS, JobSpec


class PackedWeights:
    """Which gathered weights the living graphs hold. Methods that end a graph give the handles that may go."""

    def __init__(self, job: JobSpec, trace: StepTrace) -> None:
        backward = next((i for i, e in enumerate(trace.events) if e.op is TraceOp.BACKWARD), len(trace.events))
        recomputed = {e.a for e in trace.events[backward:] if e.op is TraceOp.ENTER}
        differentiated = {e.a for e in trace.events if e.op is TraceOp.BACKWARD_ENTER}
        weights = {p.module: i for i, p in enumerate(trace.params) if p.name.endswith("weight")}
        self.of_module = {m: i for m, i in weights.items() if trace.modules[m].cls == "Linear4bit" and m in differentiated}
        self.reentrant = job.activation_checkpointing.use_reentrant
        self.without_graph = recomputed if self.reentrant else set()  # their first forward runs under no_grad
        self.dies_in_step = job.loop in TRAINER_LOOPS
        self.graphs: list[set[int]] = []
        self.outlived: list[int] = []
        self.in_forward = False

    def begin_micro_batch(self) -> list[int]:
        """A Trainer's loss has gone when training_step returned; in other loops its name keeps it until the next forward has run."""
        gone = self._drop(0 if self.dies_in_step else 1)
        self.graphs.append(set())
        self.in_forward = True
        return gone

    def begin_backward(self) -> list[int]:
        self.in_forward = False
        return self._drop(1)

    def end_step(self) -> list[int]:
        return self._drop(0) if self.dies_in_step else []

    def _drop(self, kept: int) -> list[int]:
        """All graphs but the newest go, and the weights that only they held."""
        del self.graphs[: max(0, len(self.graphs) - kept)]
        held = set[int]().union(*self.graphs)
        gone = [h for h in self.outlived if h not in held]
        self.outlived = [h for h in self.outlived if h in held]
        return gone

    def ran(self, module: int, gathered: Mapping[int, int]) -> None:
        """The module's forward has made its node."""
        param = self.of_module.get(module)
        if self.in_forward and param is not None and module not in self.without_graph:
            self.graphs[-1].add(gathered[param])

    def kept_to_backward(self, module: int) -> bool:
        """What it recomputes it keeps until its backward: as detached tensors that a checkpoint saved (torch/utils/checkpoint.py:pack_hook)
        or, a 4-bit weight, on the node of a reentrant checkpoint's own graph."""
        return self.reentrant == (module in self.of_module)

    def released(self, handle: int) -> bool:
        """ZeRO lets go of a gathered weight: does a graph hold it?"""
        held = any(handle in graph for graph in self.graphs)
        if held:
            self.outlived.append(handle)
        return held
