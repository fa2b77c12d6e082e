"""Phases of a training run, and the peaks in each. A phase is marked by wrapping the calls that make it; the outermost mark wins."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

NUMBERED = ("forward", "backward", "after_backward", "step")  # these belong to an optimizer step: _1 is the first, _2 all later ones


class StepsDone(BaseException):
    """Raised after the last optimizer step that was asked for: ends the script, past its `except Exception`."""


class Peaks:
    """Peaks of one phase in bytes, and what is left at its end."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.end_allocated = self.end_reserved = self.calls = 0

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class Recorder:
    """Follows one process. The script's own view of torch.cuda.max_memory_* stays what it would be without us."""

    def __init__(self, device: int, max_steps: int | None) -> None:
        self.device, self.max_steps = device, max_steps
        self.phase, self.depth, self.steps = "load", 0, 0
        self.phases: dict[str, Peaks] = {}
        self.marks: list[tuple[int, str]] = [(now_us(), "load")]  # when which phase began, for the breakdown
        self.root: torch.nn.Module | None = None
        self.names: dict[int, str] = {}
        self.module = ""
        self.optimizers: dict[int, Any] = {}
        self.ooms: list[dict[str, Any]] = []
        self.peak = [0, 0]  # of the whole run: allocated, reserved
        self.peak_phase = "load"
        self.seen_by_script = [0, 0]
        self.on_phase: list[Callable[[], None]] = []
        self.stop_hooks: list[Callable[[], bool]] = []  # asked after the last step: True keeps the script going
        self._stats = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved, torch.cuda.reset_peak_memory_stats)
        self._stepping: Any = None

    # -------------------------------------------------------- reading the allocator
    def flush(self) -> None:
        """Give the allocator's peaks since the last flush to the phase that ends now."""
        if not torch.cuda.is_initialized():
            return
        allocated, reserved = self._stats[0](self.device), self._stats[1](self.device)
        row = self.phases.setdefault(self._row(), Peaks())
        row.allocated, row.reserved = max(row.allocated, allocated), max(row.reserved, reserved)
        row.end_allocated, row.end_reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        if allocated > self.peak[0]:
            self.peak_phase = self._row()
        for peaks in (self.peak, self.seen_by_script):
            peaks[:] = [max(peaks[0], allocated), max(peaks[1], reserved)]
        self._stats[2](self.device)

    def _row(self) -> str:
        base, _, number = self.phase.rpartition("_")
        return f"{base}_{min(int(number), 2)}" if base in NUMBERED and number.isdigit() else self.phase

    def go(self, name: str) -> None:
        """A phase begins; forward, backward and step carry the number of the optimizer step that they work for."""
        self.flush()
        self.phase = f"{name}_{self.steps + 1}" if name in NUMBERED else name
        self.phases.setdefault(self._row(), Peaks()).calls += 1
        self.marks.append((now_us(), self._row()))
        for hook in self.on_phase:
            hook()

    # -------------------------------------------------------- marking
    def wrap(self, owner: Any, attribute: str, name: str, after: str | None = None, when: Callable[..., bool] | None = None) -> None:
        """The method is phase `name` while it runs, then phase `after` (default: what was before)."""
        original = getattr(owner, attribute, None)
        if original is None or getattr(original, "_launchguard", False):
            return

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if self.depth or not _in_main_thread() or (when and not when(*args, **kwargs)):
                return original(*args, **kwargs)
            before = self.phase
            self.depth += 1
            self.go(name)
            try:
                out = original(*args, **kwargs)
            finally:
                self.depth -= 1
            self.go(after or before)
            if name == "step":
                self._stepped()
            return out

        vars(marked)["_launchguard"] = True
        setattr(owner, attribute, marked)

    def install(self) -> None:
        """Marks in torch itself; those of the libraries come when they are imported (libraries.py)."""
        from torch.optim import optimizer

        torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        torch.nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        self.wrap(torch.Tensor, "backward", "backward", "after_backward")
        self.wrap(torch.autograd, "backward", "backward", "after_backward")
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        self._keep_script_view()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if not _in_main_thread():
            return
        if self.depth == 0:
            if module is not self.root:
                self.root = module
                self.names = {id(m): n for n, m in module.named_modules()}
            trained = torch.is_grad_enabled() and module.training
            # without gradients, but between a forward and its backward: a reference model's part of the loss
            self.go("forward" if trained or self.phase.startswith("forward") else "eval")
        if self.depth == 0 or self._in_forward():
            self.depth += 1
        self.module = self.names.get(id(module), self.module)

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if _in_main_thread() and self.depth and self._in_forward():
            self.depth -= 1
            if self.depth == 0 and self.phase == "eval":
                self.go("idle")

    def _in_forward(self) -> bool:
        return self.phase.startswith(("forward", "eval"))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        if self.depth == 0:
            self.depth, self._stepping = 1, optimizer
            self.go("step")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is optimizer:
            self.depth, self._stepping = 0, None
            self.go("idle")
            self._stepped()

    def _stepped(self) -> None:
        self.steps += 1
        if self.max_steps is not None and self.steps >= self.max_steps and not any(hook() for hook in self.stop_hooks):
            raise StepsDone

    def _keep_script_view(self) -> None:
        """torch.cuda.max_memory_* and reset_* for the script, although we reset the counters at every phase."""

        def reset(device: Any = None) -> None:
            self.flush()
            self.seen_by_script = [0, 0]

        def peak(index: int) -> Callable[..., int]:
            def read(device: Any = None) -> int:
                self.flush()
                now = torch.cuda.memory_allocated(device) if index == 0 else torch.cuda.memory_reserved(device)
                return max(self.seen_by_script[index], now)

            return read

        for module in (torch.cuda, torch.cuda.memory):
            module.reset_peak_memory_stats = module.reset_max_memory_allocated = reset
            module.max_memory_allocated, module.max_memory_reserved = peak(0), peak(1)

    # -------------------------------------------------------- out of memory
    def out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        """torch's observer: an allocation failed after the cache had been given back."""
        self.ooms.append({"phase": self._row(), "module": self.module if self._in_forward() else "", "device": device,
                          "requested_bytes": requested, "allocated_bytes": torch.cuda.memory_allocated(device),
                          "reserved_bytes": torch.cuda.memory_reserved(device), "free_bytes": free})  # fmt: skip


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def now_us() -> int:
    return time.time_ns() // 1000
