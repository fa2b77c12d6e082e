"""The replay of a micro-batch where no framework puts identities on modules' inputs."""

from __future__ import annotations

from launchguard.events import ModuleInfo, Op, StepTrace, TraceEvent, TraceOp
from launchguard.strategies._stream import MicroBatch, MicroBatchHooks, Stream, without_identities

ALLOC, FREE, GRAD, EXIT = TraceOp.ALLOC, TraceOp.FREE, TraceOp.GRAD, TraceOp.BACKWARD_EXIT


def events(*rows: tuple[TraceOp, int, int]) -> list[TraceEvent]:
    return [TraceEvent(*r) for r in rows]


def test_what_an_identity_frees_goes_before_the_hooks_of_the_node_before_it() -> None:
    node = events((ALLOC, 1, 8), (ALLOC, 2, 8), (FREE, 9, 0))
    hooks = events((GRAD, 0, 2), (FREE, 2, 0))
    end, freed = events((EXIT, 3, 0)), events((FREE, 1, 0), (FREE, 7, 0))
    after = events((ALLOC, 4, 8), (FREE, 4, 0))
    assert without_identities(node + hooks + end + freed + after) == node + freed + hooks + end + after


def test_hooks_of_a_later_node_keep_their_place() -> None:
    first = events((ALLOC, 1, 8), (EXIT, 3, 0))
    later = events((GRAD, 0, 1), (EXIT, 2, 0))
    assert without_identities(first + later + events((FREE, 7, 0))) == first + events((FREE, 7, 0)) + later


def test_nothing_moves_without_an_identity() -> None:
    plain = events((ALLOC, 1, 8), (GRAD, 0, 1), (FREE, 1, 0), (ALLOC, 2, 8), (FREE, 7, 0), (FREE, 2, 0))
    assert without_identities(plain) == plain


def test_what_the_loops_variables_hold_goes_behind_the_next_forward() -> None:
    outputs = events((TraceOp.FORWARD, 0, 0), (ALLOC, 1, 512), (TraceOp.BACKWARD, 0, 0), (ALLOC, 2, 1024), (FREE, 2, 0),
                     (TraceOp.END, 0, 0), (FREE, 1, 0))  # fmt: skip
    micro_batch = MicroBatch(StepTrace((), (ModuleInfo("", "Model", -1),), (), tuple(outputs), {}, (), ()))
    stream, held = Stream(), list[int]()
    for _ in range(2):
        micro_batch.run(stream, MicroBatchHooks(), held=held)
    order = [(e.op, e.handle or e.label) for e in stream.events if e.op is not Op.MODULE]
    first, second = held[0], order[1][1]
    assert first != second and order.index((Op.FREE, second)) == order.index((Op.ALLOC, first)) + 1
    assert [o for o, h in order if h == first] == [Op.ALLOC]
