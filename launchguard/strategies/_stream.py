"""The event stream of one rank, and the replay of a traced micro-batch into it. Knows no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launchguard.events import Category, MemoryEvent, Op, StepTrace, TraceEvent, TraceOp


class Stream:
    """Collects what one rank allocates, in host order. Bytes as requested; the allocator rounds."""

    def __init__(self) -> None:
        self.events: list[MemoryEvent] = []
        self._next = 1

    def alloc(self, nbytes: int, category: Category, label: str, stream: int = 0) -> int:
        """A handle to new bytes; 0 bytes give handle 0, which may be freed and is ignored."""
        if nbytes <= 0:
            return 0
        handle = self._next
        self._next += 1
        self.events.append(MemoryEvent(Op.ALLOC, handle, nbytes, category, label, stream))
        return handle

    def free(self, *handles: int) -> None:
        for handle in handles:
            if handle:
                self.events.append(MemoryEvent(Op.FREE, handle))

    def touch(self, nbytes: int, category: Category, label: str, stream: int = 0) -> None:
        """A temporary: allocated and freed at once."""
        self.free(self.alloc(nbytes, category, label, stream))

    def phase(self, name: str) -> None:
        self.events.append(MemoryEvent(Op.PHASE, label=name))

    def module(self, name: str) -> None:
        self.events.append(MemoryEvent(Op.MODULE, label=name))

    def empty_cache(self) -> None:
        self.events.append(MemoryEvent(Op.EMPTY_CACHE))


class MicroBatchHooks:
    """What a framework does at the marks of a micro-batch. Every method may allocate and free on the stream; modules and
    parameters are indexes into StepTrace.modules and StepTrace.params."""

    def forward_begin(self) -> None: ...

    def enter(self, module: int, recompute: bool) -> None:
        """Before a module's forward; recompute: it runs again inside backward (activation checkpointing)."""

    def exit(self, module: int, recompute: bool) -> None: ...

    def returned(self, outputs: Mapping[int, int]) -> Mapping[int, int]:
        """After the whole model's forward: handles of what it returns, by storage; gives those that take their place."""
        return {}

    def forward_end(self) -> None: ...

    def backward_begin(self) -> None: ...

    def backward_enter(self, module: int) -> None: ...

    def backward_exit(self, module: int) -> None: ...

    def grad(self, param: int, handle: int) -> None:
        """A parameter's gradient of this micro-batch is complete; its handle is the strategy's from here on."""

    def backward_end(self) -> None: ...


def saved_for_backward(trace: StepTrace) -> frozenset[int]:
    """Storages that are alive when backward begins: activations. All others are temporaries."""
    live: set[int] = set()
    for op, a, _ in trace.events:
        if op is TraceOp.ALLOC:
            live.add(a)
        elif op is TraceOp.FREE:
            live.discard(a)
        elif op is TraceOp.BACKWARD:
            return frozenset(live)
    return frozenset()


def kept_by_autograd(trace: StepTrace) -> frozenset[int]:
    """Storages that die within backward: a node of the graph holds them, whoever else does."""
    died: set[int] = set()
    in_backward = False
    for op, a, _ in trace.events:
        in_backward = op is TraceOp.BACKWARD or (in_backward and op is not TraceOp.END)
        if in_backward and op is TraceOp.FREE:
            died.add(a)
    return frozenset(died)


def without_identities(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """The events where no framework puts an identity on modules' inputs, as the tracer does for BACKWARD_EXIT: autograd hands a node's
    gradients on, and adds them up, before the hooks of its parameters run (torch 2.13 autograd/engine.cpp:evaluate_function; AccumulateGrad
    is first in the ready queue). What a gradient frees when it has passed the identity goes before those hooks."""
    out: list[TraceEvent] = []
    first_grad = 0  # where the hooks stand that ran since anything else did; out's length when none did
    passed = False  # an identity stands behind them
    grads: set[int] = set()
    for e in events:
        if e.op is TraceOp.BACKWARD_EXIT:
            passed = True
        elif e.op is TraceOp.FREE and passed:
            out.insert(first_grad, e)
            first_grad += 1
            continue
        elif e.op is TraceOp.GRAD:
            if passed:
                passed, first_grad = False, len(out)
            grads.add(e.b)
        elif e.op is not TraceOp.FREE or e.a not in grads:
            passed, first_grad = False, len(out) + 1
        out.append(e)
    return out


class MicroBatch:
    """One traced micro-batch, ready to be replayed any number of times. identities: the framework puts some on modules' inputs.

    workspace_bytes: cuBLAS keeps one workspace per thread that multiplies matrices: the main thread's appears in the first
    forward, autograd's in the first backward (allocator_overheads: measured, inside torch's allocated bytes).
    """

    def __init__(self, trace: StepTrace, workspace_bytes: int = 0, identities: bool = True) -> None:
        self.trace = trace
        self._cold = [workspace_bytes, workspace_bytes]  # forward, backward
        self.inputs = frozenset(i for i in trace.inputs if i > 0)
        self.input_bytes = [b for op, a, b in trace.events if op is TraceOp.ALLOC and a in self.inputs]
        self.events = [(int(op), a, b) for op, a, b in (trace.events if identities else without_identities(trace.events))]
        self.saved = saved_for_backward(trace)
        self.names = [m.name or m.cls for m in trace.modules]
        self.kept = frozenset(p.storage for p in trace.predictions)
        self.is_grad = {b for op, _, b in trace.events if op is TraceOp.GRAD}

    def _warm_up(self, stream: Stream, thread: int) -> None:
        stream.alloc(self._cold[thread], Category.OVERHEAD, "cuBLAS workspace")
        self._cold[thread] = 0

    def run(
        self, stream: Stream, hooks: MicroBatchHooks, phase: Sequence[str] = ("forward", "backward"), inputs_held: bool = False,
        held: list[int] | None = None,
    ) -> dict[int, int]:  # fmt: skip
        """Replay forward and backward (an evaluation batch has no backward), calling the hooks at every mark. phase: names of the two
        phases; inputs_held: the loop holds the micro-batch itself, so it is neither allocated nor freed here; held: what the loop's
        variables (outputs, loss) hold from the last micro-batch: goes when they are assigned anew behind forward, and is filled again.
        Gives the handles of an evaluation's predictions, by storage: they are the caller's to free."""
        elsewhere = self.inputs if inputs_held else frozenset()
        alloc, free, enter, exit_, b_enter, b_exit, grad, forward, backward, end, matmul = range(len(TraceOp))
        handles: dict[int, int] = {}
        owned: set[int] = set()
        where, in_backward, ended = [self.names[0]], False, False
        for op, a, b in self.events:
            if op <= free and a in elsewhere:
                continue
            if op == alloc:
                category = (
                    Category.ACTIVATIONS
                    if a in self.saved or a in self.kept
                    else Category.GRADIENTS
                    if a in self.is_grad
                    else Category.TEMPORARIES
                )
                handles[a] = stream.alloc(b, category, where[-1])
            elif op == free:
                if a in self.kept:
                    continue
                handle = handles.pop(a, 0)
                if a in owned:
                    owned.discard(a)
                elif ended and held is not None:
                    held.append(handle)
                else:
                    stream.free(handle)
            elif op == enter:
                where.append(self.names[a])
                stream.module(where[-1])
                hooks.enter(a, in_backward)
            elif op == exit_:
                hooks.exit(a, in_backward)
                if a == 0 and not in_backward:
                    handles.update(hooks.returned({s: handles[s] for s, _ in self.trace.outputs if s in handles}))
                if len(where) > 1:
                    where.pop()
                stream.module(where[-1])
            elif op == b_enter:
                if in_backward:
                    where[-1] = self.names[a]
                    stream.module(where[-1])
                hooks.backward_enter(a)
            elif op == b_exit:
                hooks.backward_exit(a)
            elif op == grad:
                owned.add(b)
                hooks.grad(a, handles.get(b, 0))
            elif op == forward:
                stream.phase(phase[0])
                hooks.forward_begin()
            elif op == backward:
                hooks.forward_end()
                if held:
                    stream.free(*held)
                    held.clear()
                stream.phase(phase[1])
                in_backward, where = True, [self.names[0]]
                hooks.backward_begin()
            elif op == matmul:
                self._warm_up(stream, int(in_backward))
            elif op == end and in_backward:
                ended = True
                hooks.backward_end()
            elif op == end:
                hooks.forward_end()
        predictions = {a: handles.pop(a, 0) for a in self.kept}
        stream.free(*handles.values())
        return predictions
