"""Evaluation in the Hugging Face Trainer: forward passes without gradients, and what the loop keeps of them.

Read in transformers 5.24 trainer.py:evaluation_loop, prediction_step, trainer_pt_utils.py:EvalLoopContainer and accelerate 1.15
utils/operations.py:_gpu_gather; measured on a virtual card (tests/measured).
"""

from __future__ import annotations

from launchguard.events import Category, StepTrace
from launchguard.job import EvaluationSpec
from launchguard.strategies._stream import MicroBatch, MicroBatchHooks, Stream
from launchguard.units import dtype_bytes

PHASE = "evaluation"
ASSUMED_BATCHES = 2  # of a set whose size nobody states: the fewest that show what one more batch adds
WHOLE_BATCHES = 2  # at either end whose forward passes are replayed; those between only add to the containers


class Container:
    """EvalLoopContainer of one kind of tensor: each batch makes a longer tensor of the old one and itself (nested_concat), or a list."""

    def __init__(self, stream: Stream, concatenate: bool, label: str) -> None:
        self.stream, self.concatenate, self.label = stream, concatenate, label
        self.held: list[int] = []
        self.nbytes = 0

    def add(self, handle: int, nbytes: int) -> int:
        """Take a batch's tensor in; its handle while a variable of the loop still holds it apart from the container, else 0."""
        if not self.held or not self.concatenate:
            self.held.append(handle)
            self.nbytes += nbytes
            return 0
        self.nbytes += nbytes
        longer = self.stream.alloc(self.nbytes, Category.ACTIVATIONS, self.label)
        self.stream.free(*self.held)
        self.held = [longer]
        return handle

    def clear(self) -> None:
        """to_cpu_and_numpy: what is held goes to the host."""
        self.stream.free(*self.held)
        self.held, self.nbytes = [], 0


class Evaluation:
    """One run over the evaluation set. ranks: whose predictions meet on every one of them; share: batches that come to this device at
    once, for it and for others (DataParallel)."""

    def __init__(self, stream: Stream, spec: EvaluationSpec, trace: StepTrace, ranks: int, share: int = 1) -> None:
        self.stream, self.spec, self.ranks = stream, spec, ranks * share
        self.batch = MicroBatch(trace)
        self.input_bytes = [n * share for n in self.batch.input_bytes]
        self.sizes = [] if spec.loss_only else kept_bytes(spec, trace)
        self.containers = [Container(stream, spec.concatenate, "kept predictions") for _ in self.sizes]
        self.variables: list[int] = []  # what the loop's own names hold of the last batch
        self.inputs: list[int] = []

    def run(self, hooks: MicroBatchHooks) -> None:
        """With accumulation_steps every turn begins with nothing on the device, so one turn shows them all."""
        batches, every = self.spec.batches or max(ASSUMED_BATCHES, self.spec.accumulation_steps or 0), self.spec.accumulation_steps
        batches = min(batches, every or batches)
        self.stream.phase(PHASE)
        for n in range(batches):
            if n < WHOLE_BATCHES or n >= batches - WHOLE_BATCHES:
                self._take(self._predict(hooks))
            elif self.sizes and not self.spec.per_batch:
                self._take([self.stream.alloc(size, Category.ACTIVATIONS, "predictions") for size in self.sizes])
            if self.spec.per_batch or every is not None and (n + 1) % every == 0:
                self._to_host()
                self.stream.empty_cache()
        self._to_host()

    def _predict(self, hooks: MicroBatchHooks) -> list[int]:
        """The loader's next batch, which replaces the last one when it is there, and prediction_step; what it returns."""
        stream = self.stream
        fresh = [stream.alloc(n, Category.ACTIVATIONS, "inputs") for n in self.input_bytes]
        stream.free(*self.inputs)
        self.inputs = fresh
        handles = self.batch.run(stream, hooks, (PHASE, PHASE), inputs_held=True)
        if self.sizes and not self.spec.reduced:
            labels = stream.alloc(self.sizes[-1], Category.ACTIVATIONS, "labels")
            return [*(handles.get(p.storage, 0) for p in self.batch.trace.predictions), labels]
        reduced = [stream.alloc(size, Category.ACTIVATIONS, "predictions") for size in self.sizes]
        stream.free(*handles.values())
        return reduced

    def _take(self, predictions: list[int]) -> None:
        """Names of the last batch are assigned anew; predictions are gathered from all ranks and put into the containers."""
        stream = self.stream
        stream.free(*self.variables)
        self.variables = []
        for container, handle, size in zip(self.containers, predictions, self.sizes):
            if self.ranks > 1:
                gathered = stream.alloc(size * self.ranks, Category.ACTIVATIONS, "predictions of all ranks")
                stream.free(handle)
                handle = gathered
            self.variables.append(handle if self.spec.per_batch else container.add(handle, size * self.ranks))

    def _to_host(self) -> None:
        """to_cpu_and_numpy, and `del losses, logits, labels, inputs` (at the end: the function returns)."""
        for container in self.containers:
            container.clear()
        self.stream.free(*self.variables, *self.inputs)
        self.variables, self.inputs = [], []


def kept_bytes(spec: EvaluationSpec, trace: StepTrace) -> list[int]:
    """Bytes of each tensor that the loop keeps of one batch on one rank. preprocess_logits_for_metrics is taken to be an argmax over the
    vocabulary or the classes: one index for each label."""
    labels = int(trace.facts.get("label_bytes") or 0)
    if spec.reduced:
        return [labels or spec.batch_size * dtype_bytes("int64"), labels]
    return [*(p.nbytes for p in trace.predictions), labels]
