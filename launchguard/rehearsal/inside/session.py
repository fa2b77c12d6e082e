"""Everything that is put around the user's script, and the record of what it did."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from launchguard.rehearsal.inside import containment, cudnn, host_pages
from launchguard.rehearsal.inside.breakdown import Breakdown
from launchguard.rehearsal.inside.libraries import Libraries, after_import
from launchguard.rehearsal.inside.peers import Peers
from launchguard.rehearsal.inside.phases import Recorder, StepsDone
from launchguard.rehearsal.inside.values import Values
from launchguard.rehearsal.inside.weights import RandomWeights

LIBRARIES = ("transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes")
TRACEBACK_FRAMES = 12
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _binary(capability: tuple[int, int], built_for: str) -> int:
    """Compute capability, as 10 x major + minor, of the kernels that a card takes from torch: the newest of its own generation that torch
    was built for, else the newest that it can translate. built_for: "sm_80 sm_86 sm_90 compute_90"."""
    card = 10 * capability[0] + capability[1]
    built = [int("".join(c for c in arch if c.isdigit())) for arch in built_for.split()]
    return max((arch for arch in built if arch <= card), default=card)


class Session:
    """order: device, steps, through_save, padding, random_weights, communicator_bytes, work (scratch folder), beside the script itself."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        work = Path(order["work"])
        self.cudart = ctypes.CDLL(os.environ["LAUNCHGUARD_CUDART"])
        self.cudart.vcard_used.restype = self.cudart.vcard_peak.restype = ctypes.c_uint64
        self.cudart.vcard_binary(_binary(torch.cuda.get_device_capability(), torch._C._cuda_getArchFlags()))
        self.recorder = Recorder(order["device"], order["steps"])
        self.values = Values(self.cudart, order["padding"])
        self.peers = Peers(self.cudart, order["device"], order["communicator_bytes"])
        self.breakdown = Breakdown(self.recorder)
        self.recorder.install()
        self.values.install()
        self.peers.install()
        self.breakdown.install()
        cudnn.install()
        Libraries(self.recorder, self.values, self.peers).install()
        if order["random_weights"]:
            RandomWeights(work).install()
            host_pages.install()
        if order["through_save"]:
            self.recorder.stop_hooks.append(lambda: True)  # the script ends by itself, a Trainer after one evaluation and one save
            after_import({"transformers.trainer": self._evaluate_and_save})
        torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(self.recorder.out_of_memory))
        containment.install()

    def stopped_as_asked(self, error: BaseException) -> bool:
        return isinstance(error, StepsDone)

    def _evaluate_and_save(self, module: Any) -> None:
        """A callback of the Trainer's own: after the last step evaluate (if there is an evaluation set), save, stop."""
        steps, trainer_class = self.order["steps"], module.Trainer
        initialise = trainer_class.__init__

        class ThroughSave(module.TrainerCallback):
            def __init__(self, trainer: Any) -> None:
                self.trainer = trainer

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                if state.global_step >= steps:
                    control.should_evaluate = self.trainer.eval_dataset is not None
                    control.should_save = control.should_training_stop = True
                return control

        def initialised(trainer: Any, *args: Any, **kwargs: Any) -> None:
            initialise(trainer, *args, **kwargs)
            trainer.add_callback(ThroughSave(trainer))

        trainer_class.__init__ = initialised

    # -------------------------------------------------------- the record
    def record(self, error: BaseException | None, code: int, seconds: float) -> dict[str, Any]:
        recorder = self.recorder
        recorder.flush()
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or (code != 0 and bool(recorder.ooms))
        stopped = error is not None and self.stopped_as_asked(error)
        result = "oom" if out_of_memory else "ok" if code == 0 and (error is None or stopped) else "error"
        device = recorder.device
        stats = torch.cuda.memory_stats(device) if torch.cuda.is_initialized() else {}
        return {
            "result": result, "exit_code": code, "stopped_after_steps": stopped, "optimizer_steps": recorder.steps,
            "phases": {name: peaks.as_dict() for name, peaks in recorder.phases.items()},
            "max_allocated": recorder.peak[0], "max_reserved": recorder.peak[1], "peak_phase": recorder.peak_phase,
            "device_peak": self.cudart.vcard_peak(device), "alloc_retries": stats.get("num_alloc_retries", 0), "ooms": recorder.ooms,
            "live_at_peak": self.breakdown.at_peak(), "failed_in": recorder.phase if result == "error" else None,
            "error": None if error is None or stopped else _described(error), "versions": _versions(), "seconds": seconds,
            "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "value_reads": self.values.reads, "awaited": self.peers.awaited, "without_cudnn": sorted(cudnn.used),
        }  # fmt: skip


def _described(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((OWN_FOLDER, "<frozen"))]
    user = [frame for frame in own if "site-packages" not in frame.filename and f"{os.sep}lib{os.sep}python" not in frame.filename]
    where = user[-1] if user else None
    return {
        "type": type(error).__name__, "message": str(error)[:2000],
        "where": f"{where.filename}:{where.lineno}" if where else "", "line": (where.line or "") if where else "",
        "traceback": "".join(traceback.format_list(own[-TRACEBACK_FRAMES:])),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    found.update({name: str(getattr(sys.modules[name], "__version__", "?")) for name in LIBRARIES if name in sys.modules})
    return found
