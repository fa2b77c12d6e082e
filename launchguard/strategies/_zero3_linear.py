"""ZeRO-3 replaces torch.nn.functional.linear (zero/linear.py:LinearFunctionForZeroStage3, memory_efficient_linear; deepspeed 0.19.8).

torch's own linear saves its input only to compute the weight's gradient. DeepSpeed's saves it always, so under ZeRO-3 the inputs of
frozen linear layers (adapters, partly frozen models) stay until their backward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from launchguard.events import StepTrace, TraceEvent, TraceOp


def keep_linear_inputs(trace: StepTrace) -> StepTrace:
    """The trace as ZeRO-3 runs it: storages that enter a frozen linear layer live until that layer's backward."""
    weights = [p for p in trace.params if not p.requires_grad and len(p.shape) == 2]
    frozen = {m for p in weights for m in p.owners if trace.modules[m].cls == "Linear"}
    differentiated = {a for op, a, _ in trace.events if op is TraceOp.BACKWARD_EXIT}
    layers = frozen & differentiated
    if not layers:
        return trace
    return dataclasses.replace(trace, events=tuple(_Keeper(trace, layers).run()))


class _Keeper:
    """One pass over the events. A layer that is recomputed saves its input then, not in the first forward."""

    def __init__(self, trace: StepTrace, layers: set[int]) -> None:
        self.events, self.layers = trace.events, layers
        backward = next(i for i, e in enumerate(trace.events) if e.op is TraceOp.BACKWARD)
        self.recomputed = {a for op, a, _ in trace.events[backward:] if op is TraceOp.ENTER}
        self.holding: dict[int, list[int]] = {}
        self.holds: Counter[int] = Counter()
        self.late: set[int] = set()
        self.out: list[TraceEvent] = []

    def run(self) -> list[TraceEvent]:
        in_backward = False
        for event in self.events:
            op, a, b = event
            if op is TraceOp.FREE and self.holds[a]:
                self.late.add(a)
                continue
            if op is TraceOp.BACKWARD:
                in_backward = True
            elif op is TraceOp.ENTER and b > 0 and a in self.layers and (in_backward or a not in self.recomputed):
                self.holding.setdefault(a, []).append(b)
                self.holds[b] += 1
            elif op is TraceOp.BACKWARD_EXIT and self.holding.get(a):
                self._let_go(self.holding[a].pop())
            elif op is TraceOp.END:
                for storage in [s for held in self.holding.values() for s in held]:
                    self._let_go(storage)
            self.out.append(event)
        return self.out

    def _let_go(self, storage: int) -> None:
        self.holds[storage] -= 1
        if not self.holds[storage] and storage in self.late:
            self.late.discard(storage)
            self.out.append(TraceEvent(TraceOp.FREE, storage))
