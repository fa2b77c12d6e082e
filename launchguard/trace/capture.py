"""One micro-batch of the real module under fake tensors, as a StepTrace.

A storage is born at the first op output that carries it and dies when PyTorch frees it (weak reference on the storage object, which
PyTorch keeps alive as long as the C++ storage). Scratch that a CUDA op holds while it runs is added from cuda_semantics.SCRATCH.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from launchguard.events import ModuleInfo, ParamInfo, Prediction, StepTrace, TraceEvent, TraceOp
from launchguard.trace.cuda_semantics import DEVICE, SCRATCH, Card

aten = torch.ops.aten
MATMULS = frozenset(getattr(aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm"))
VALUE_READS = frozenset((aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default))
IN_PLACE_IN_BACKWARD = frozenset(
    (aten.add.Tensor, aten.index_put.default, aten.index_add.default, aten.scatter.src, aten.scatter_add.default)
)
LAST_OUTPUT_FIRST = frozenset((aten.native_dropout.default,))  # the mask (native/cuda/Dropout.cu:dropout_cuda)
# libraries whose reads change no sizes: Liger's count of labels and its question whether the loss is scaled (liger_kernel 0.8.5 ops/)
KNOWN_READERS = ("/liger_kernel/",)


def _grouped_float16(func: Any, args: Any) -> torch.Tensor:
    """Experts in float16: the kernels take it (torch 2.13 ATen/native/GroupedMMUtils.h), the meta function takes bfloat16 alone; bytes are
    the same."""
    first, second, *rest = args
    return func(first.view(torch.bfloat16), second.view(torch.bfloat16), *rest).view(torch.float16)


class Tracker(TorchDispatchMode):
    """Logs births and deaths of the device's storages, and the marks that the hooks put between them."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card
        self.events: list[TraceEvent] = []
        self.in_backward = False
        self.depth = 0  # of module calls; above zero inside backward: a recomputed forward
        self._ids: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self.value_reads: set[str] = set()
        self.saved_on_host: list[int] = []  # sizes of what forward copied to the host for backward (torch.autograd.graph.save_on_cpu)
        self._warm = [False, False]  # forward, backward: a matrix product has run there

    # storages --------------------------------------------------------------------------------------------------------
    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that exist before the micro-batch (parameters, buffers)."""
        for t in tensors:
            storage = t.untyped_storage()
            self._ids[storage._cdata] = -1
            self._refs[storage._cdata] = weakref.ref(storage)

    def see(self, t: torch.Tensor, like: int | None = None) -> int:
        """Trace id of a tensor's storage; a new storage is born here (or takes over the allocation `like`)."""
        storage = t.untyped_storage()
        key = storage._cdata
        ref = self._refs.get(key)
        if ref is not None and ref() is not None:
            return self._ids[key]
        if t.device.type != DEVICE:
            return -1
        nbytes = storage.nbytes()
        if like is None:
            if nbytes == 0:
                return -1
            like = self._allocate(nbytes)
        self._ids[key] = like
        self._refs[key] = weakref.ref(storage, functools.partial(self._died, key))
        return like

    def _died(self, key: int, _: Any) -> None:
        ident = self._ids.pop(key, -1)
        self._refs.pop(key, None)
        if ident > 0:
            self.events.append(TraceEvent(TraceOp.FREE, ident))

    def mark(self, op: TraceOp, a: int = 0, b: int = 0) -> None:
        self.events.append(TraceEvent(op, a, b))

    # ops -------------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        if func in VALUE_READS:
            return self._read_value(args[0], func is aten.equal.default)
        if func is aten._to_copy.default and torch.device((kwargs or {}).get("device") or "cpu").type == DEVICE:
            if not isinstance(args[0], FakeTensor):  # an index list, made by C++: fake mode would move real values to a device without any
                return self._born(torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=DEVICE))
            args[0].constant = None
        if func is aten.copy_.default and not self.in_backward and args[0].device.type == "cpu" and args[1].device.type == DEVICE:
            self.saved_on_host.append(args[0].numel() * args[0].element_size())
        taken = self._taken_over(func, args)
        out = (
            _grouped_float16(func, args)
            if func is aten._grouped_mm.default and args[0].dtype is torch.float16
            else func(*args, **(kwargs or {}))
        )
        if isinstance(out, torch.Tensor):
            self.see(out, taken)
        elif isinstance(out, (list, tuple)):
            for t in reversed(out) if func in LAST_OUTPUT_FIRST else out:
                if isinstance(t, torch.Tensor):
                    self.see(t)
        if func in MATMULS and not self._warm[self.in_backward]:  # the output is there when cuBLAS is asked
            self._warm[self.in_backward] = True
            self.mark(TraceOp.MATMUL)
        scratch = SCRATCH.get(func)
        if scratch is not None:
            self._touch(*scratch(self.card, args, out))
        return out

    def _born(self, t: torch.Tensor) -> torch.Tensor:
        self.see(t)
        return t

    def _read_value(self, t: torch.Tensor, compared: bool) -> bool | int | float:
        """Host code asks for a value: there is none, so it reads zero (of a comparison: different), and the trace says who asked."""
        constant = getattr(t, "constant", None)
        if constant is not None and not compared:
            return constant.item()
        path, line = _caller()
        if not any(known in path for known in KNOWN_READERS):
            self.value_reads.add(f"{os.path.basename(path)}:{line}")
        return False if compared or t.dtype == torch.bool else 0.0 if t.dtype.is_floating_point else 0

    def _touch(self, *blocks: int | tuple[int, ...]) -> None:
        """Temporaries of one op, each beside the others, freed from the last to the first; an inner tuple before the next one comes."""
        held: list[int] = []
        for block in blocks:
            passing = [self._allocate(n) for n in (block if isinstance(block, tuple) else (block,)) if n]
            if isinstance(block, tuple):
                self.events += [TraceEvent(TraceOp.FREE, i) for i in reversed(passing)]
            else:
                held += passing
        self.events += [TraceEvent(TraceOp.FREE, i) for i in reversed(held)]

    def _allocate(self, nbytes: int) -> int:
        self._count += 1
        self.events.append(TraceEvent(TraceOp.ALLOC, self._count, nbytes))
        return self._count

    def _taken_over(self, func: Any, args: Any) -> int | None:
        """Autograd adds a gradient that arrives into the one that is there when nobody else holds that, and scatters one into zeros
        that it has just made; for tensor subclasses, as fake tensors are, it makes another tensor (torch 2.13 autograd/input_buffer.cpp:
        accumulate; FunctionsManual.cpp: areAnyTensorSubclassLike). Undo that: the result takes over the first."""
        if func not in IN_PLACE_IN_BACKWARD or not self.in_backward or self.depth or len(args) < 2:
            return None
        first, second = args[:2]
        if not isinstance(first, torch.Tensor) or first._is_view():
            return None
        if func is aten.add.Tensor and (not isinstance(second, torch.Tensor) or first.shape != second.shape):
            return None
        key = first.untyped_storage()._cdata
        ident = self._ids.get(key, -1)
        if ident <= 0 or torch._C._storage_Use_Count(key) != 2:  # the tensor's and Python's
            return None
        self._ids[key] = -1
        return ident


def _caller() -> tuple[str, int]:
    """File and line outside torch and launchguard that is running."""
    frame = sys._getframe(1)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or "/launchguard/trace/" in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("?", 0)


class _BackwardExit(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when the gradients of those inputs are ready."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.callback()
        return (None, *grads)


class ModuleMarks:
    """Hooks on every module: forward and backward marks, gradients handed over as they are complete. BACKWARD_EXIT needs an identity on
    the inputs, which in-place modules do not bear, so only modules that hold parameters have it."""

    def __init__(self, model: torch.nn.Module, tracker: Tracker) -> None:
        self.tracker = tracker
        self.modules, self.params, self.tensors = tables(model)
        for i, (_, module) in enumerate(model.named_modules(remove_duplicate=True)):
            holds_parameters = next(module.parameters(), None) is not None
            module.register_forward_pre_hook(self._pre(i, holds_parameters), with_kwargs=True)
            module.register_forward_hook(self._post(i), always_call=True)
        for i, p in enumerate(self.tensors):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._grad(i))

    def _pre(self, i: int, holds_parameters: bool) -> Callable[..., Any]:
        tracker = self.tracker

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
            tracker.mark(TraceOp.ENTER, i, 0 if first is None else max(tracker.see(first), 0))
            tracker.depth += 1
            if not holds_parameters or not torch.is_grad_enabled():
                return None
            slots = [(True, k) for k, x in enumerate(args) if _differentiable(x)] + [
                (False, k) for k, x in kwargs.items() if _differentiable(x)
            ]
            if not slots:
                return None
            tensors = [args[k] if positional else kwargs[k] for positional, k in slots]  # type: ignore[index]
            out = _BackwardExit.apply(lambda: tracker.mark(TraceOp.BACKWARD_EXIT, i), *tensors)
            new_args, new_kwargs = list(args), dict(kwargs)
            for (positional, k), t in zip(slots, out):
                if positional:
                    new_args[k] = t  # type: ignore[index]
                else:
                    new_kwargs[k] = t  # type: ignore[index]
            return tuple(new_args), new_kwargs

        return hook

    def _post(self, i: int) -> Callable[..., None]:
        tracker = self.tracker

        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            tracker.depth -= 1
            if output is None:  # checkpointing stopped the recomputation early: a framework's own hook does not run either
                return
            tracker.mark(TraceOp.EXIT, i)
            entered = [False]

            def backward(grad: torch.Tensor) -> None:
                if not entered[0]:
                    entered[0] = True
                    tracker.mark(TraceOp.BACKWARD_ENTER, i)

            for t in _tensors(output):
                if t.requires_grad:
                    t.register_hook(backward)

        return hook

    def _grad(self, i: int) -> Callable[[torch.Tensor], None]:
        tracker = self.tracker

        def hook(p: torch.Tensor) -> None:
            if p.grad is not None:
                tracker.mark(TraceOp.GRAD, i, tracker.see(p.grad))
                p.grad = None

        return hook


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = output.values()
    return [t for t in output if isinstance(t, torch.Tensor)] if isinstance(output, (list, tuple, type({}.values()))) else []


def tables(model: torch.nn.Module) -> tuple[tuple[ModuleInfo, ...], tuple[ParamInfo, ...], list[torch.Tensor]]:
    """Modules and parameters of a model, as the trace names them; parameters in model.parameters() order, tied ones once."""
    named = list(model.named_modules(remove_duplicate=True))
    position = {name: i for i, (name, _) in enumerate(named)}
    modules = tuple(ModuleInfo(name, type(m).__name__, position.get(name.rpartition(".")[0], 0) if name else -1) for name, m in named)
    owners: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    tensors: dict[int, torch.Tensor] = {}
    for i, (name, module) in enumerate(named):
        for key, p in module._parameters.items():
            if p is not None:
                tensors.setdefault(id(p), p)
                names.setdefault(id(p), f"{name}.{key}" if name else key)
                owners.setdefault(id(p), []).append(i)
    ordered = list(model.parameters())
    params = tuple(
        ParamInfo(names[id(p)], tuple(getattr(p, "launchguard_shape", p.shape)), str(p.dtype).removeprefix("torch."),
                  p.requires_grad and not hasattr(p, "launchguard_frozen"),
                  owners[id(p)][0], tuple(owners[id(p)]), getattr(p, "launchguard_storage_bytes", None))
        for p in ordered
    )  # fmt: skip
    return modules, params, ordered


def capture(
    mode: FakeTensorMode, model: torch.nn.Module, make_batch: Callable[[], dict[str, Any]], run: Callable[..., Any],
    card: Card, progress: Callable[[str], None], facts: dict[str, Any], outputs_alive: bool = False,
) -> StepTrace:  # fmt: skip
    """Run one micro-batch. make_batch: allocates the inputs as the loop's forward begins; run(model, batch) -> (loss, outputs)."""
    tracker = Tracker(card)
    tracker.ignore([*model.parameters(), *model.buffers()])
    marks = ModuleMarks(model, tracker)
    buffers = tuple(b.untyped_storage().nbytes() for b in model.buffers() if b.device.type == DEVICE)
    with mode, tracker:
        tracker.mark(TraceOp.FORWARD)
        progress("forward")
        batch = make_batch()
        inputs = tuple(tracker.see(t) for t in batch.values())
        loss, outputs = run(model, batch)
        batch.clear()
        returned = tuple((tracker.see(t), t.numel() * t.element_size()) for t in _tensors(outputs))
        if not outputs_alive:
            outputs = None
        tracker.mark(TraceOp.BACKWARD)
        progress("backward")
        tracker.in_backward, tracker.depth = True, 0
        loss.backward()
        tracker.mark(TraceOp.END)
        del loss, outputs
    facts["value_reads"] = sorted(tracker.value_reads)
    facts["saved_on_host"] = tracker.saved_on_host
    return StepTrace(marks.params, marks.modules, buffers, tuple(tracker.events), facts, inputs, returned)


def capture_evaluation(
    mode: FakeTensorMode, model: torch.nn.Module, make_batch: Callable[[], dict[str, Any]], run: Callable[..., Any],
    card: Card, progress: Callable[[str], None], facts: dict[str, Any], ignored: list[str],
) -> StepTrace:  # fmt: skip
    """Run one batch as Trainer.prediction_step does: no gradients; its predictions are everything that the model returns beside the loss
    and config.keys_to_ignore_at_inference (transformers 5.24 trainer.py)."""
    tracker = Tracker(card)
    tracker.ignore([*model.parameters(), *model.buffers()])
    marks = ModuleMarks(model, tracker)
    buffers = tuple(b.untyped_storage().nbytes() for b in model.buffers() if b.device.type == DEVICE)
    with mode, tracker, torch.no_grad():
        tracker.mark(TraceOp.FORWARD)
        progress("evaluation")
        batch = make_batch()
        inputs = tuple(tracker.see(t) for t in batch.values())
        facts["label_bytes"] = batch["labels"].untyped_storage().nbytes() if "labels" in batch else 0
        loss, outputs = run(model, batch)
        batch.clear()
        named = outputs.items() if isinstance(outputs, dict) else enumerate(outputs if isinstance(outputs, (tuple, list)) else ())
        kept = [v for k, v in named if k not in (*ignored, "loss", 0)]  # outputs[1:] of a tuple
        predictions = tuple(Prediction(tracker.see(t), t.numel() * t.element_size(), str(t.dtype).removeprefix("torch."))
                            for v in kept for t in _tensors(v))  # fmt: skip
        tracker.mark(TraceOp.END)
        del loss, outputs, kept
    facts["value_reads"] = sorted(tracker.value_reads)
    return StepTrace(marks.params, marks.modules, buffers, tuple(tracker.events), facts, inputs, predictions=predictions)
