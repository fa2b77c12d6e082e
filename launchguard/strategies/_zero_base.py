"""What every ZeRO stage shares: dtypes, parameter groups, the model's way to the device, host bytes.

Rules were read in deepspeed 0.19.8; docstrings name file:function, relative to deepspeed/runtime.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launchguard.errors import InputError
from launchguard.events import Category, HostPhase, StepTrace
from launchguard.job import TRAINER_LOOPS, JobSpec, ZeroSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import Engine
from launchguard.strategies._stream import Stream
from launchguard.strategies.optimizer_step import OptimizerStates, SteppedTensor
from launchguard.units import dtype_bytes, dtype_name

ALLGATHER_STREAM = 1  # side streams of DeepSpeed; each is a pool of its own in the caching allocator
REDUCE_STREAM = 2
FLOAT32 = dtype_bytes("float32")
NORM_BYTES = dtype_bytes("float64")  # zero/utils.py:get_norm_dtype on a device that has float64
BOUNDARY_BUCKET = 500_000_000  # engine.py:MEMORY_OPT_ALLREDUCE_SIZE, elements; reduce_bucket_size does not apply there

# transformers 5.24 trainer.py:get_decay_parameter_names: what the Trainer's own optimizer keeps in a group without weight decay.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
_AUTOCAST_MODULES = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d"})  # torch_autocast.py:LOWER_PRECISION_SAFE_MODULES


class Storage:
    """Bytes that several tensors may view; freed when the last of them lets go."""

    __slots__ = ("_stream", "_handle", "_views")

    def __init__(self, stream: Stream, handle: int) -> None:
        self._stream, self._handle, self._views = stream, handle, 1

    def view(self) -> Storage:
        self._views += 1
        return self

    def drop(self) -> None:
        self._views -= 1
        if self._views == 0:
            self._stream.free(self._handle)


class ZeroEngine(Engine):
    """One rank of a DeepSpeed job; subclasses are the optimizer wrappers that deepspeed.initialize may choose."""

    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        super().__init__(job, trace, rank, device)
        zero = job.zero or ZeroSpec()
        self.zero, self.world = zero, job.world_size
        self.dtype = dtype_name(zero.dtype)
        self.acc_dtype = dtype_name(zero.grad_accum_dtype) if zero.grad_accum_dtype else self.dtype
        self.comm_dtype = dtype_name(zero.communication_data_type) if zero.communication_data_type else self.dtype
        self.master_dtype = master_dtype(zero)
        self.b, self.acc, self.comm = dtype_bytes(self.dtype), dtype_bytes(self.acc_dtype), dtype_bytes(self.comm_dtype)
        self.master = dtype_bytes(self.master_dtype)
        self.numel = [p.numel for p in trace.params]
        self.groups = parameter_groups(job, trace)
        self.offload = zero.offload_optimizer != "none"
        # Accelerate steps inside accelerator.backward(loss) (accelerate 1.15 utils/deepspeed.py:DeepSpeedEngineWrapper.backward)
        self.loss_outlives_step = job.loop in (*TRAINER_LOOPS, "accelerate")
        self.boundary = True  # does this micro-batch end a gradient accumulation?
        self.model: dict[int, int] = {}  # parameter -> handle of its whole copy on the device
        self.optimizers: list[OptimizerStates] = []
        self.host_phases: list[HostPhase] = []
        self._host_moments = False

    # the model -----------------------------------------------------------------------------------------------------
    def model_to_device(self) -> None:
        """engine.py:_configure_distributed_model casts parameters where they are (host) and moves the module, parameter by parameter."""
        for i in range(len(self.numel)):
            self.model[i] = self.stream.alloc(self.param_bytes(i), Category.PARAMETERS, f"{self.word} parameters")
        self.alloc_buffers()

    def param_bytes(self, index: int) -> int:
        """Bytes of a whole parameter in the engine's dtype."""
        return self.stored_bytes(index, self.dtype)

    @property
    def word(self) -> str:
        """The engine's dtype as people say it."""
        return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(self.dtype, self.dtype)

    def overflow_flag(self) -> None:
        """ops/adam/fused_adam.py:FusedAdam.__init__: the int32 overflow flag of multi_tensor_apply."""
        if self.job.optimizer.implementation == "deepspeed_fused":
            self.stream.alloc(4, Category.OPTIMIZER_STATES, "overflow flag")

    # the optimizer -------------------------------------------------------------------------------------------------
    def first_optimizer(self) -> None:
        """The engine's basic optimizer is over the model's own parameters. One that makes its states at construction (Adagrad) keeps those:
        the wrapper constructs it anew over its partitions (stage_1_and_2.py and stage3.py:initialize_optimizer_states)."""
        params = [self.trace.params[i] for group in self.groups for i in group]
        OptimizerStates(self.stream, self.job.optimizer, [[SteppedTensor(p.shape, self.dtype) for p in params]], not self.offload)

    def optimizer_of(self, numels: Sequence[int]) -> OptimizerStates:
        """States over flat master partitions of these sizes."""
        return OptimizerStates(self.stream, self.job.optimizer, [[SteppedTensor((n,), self.moment_dtype)] for n in numels])

    @property
    def moment_dtype(self) -> str:
        return "bfloat16" if self.zero.bf16_optimizer_states else self.master_dtype if self.master == FLOAT32 else "float32"

    def norms(self, numels: Sequence[int], nbytes: int) -> None:
        """Gradient norm: each tensor is cast in turn (nothing to cast at `nbytes` 0), and leaves a scalar until all are summed."""
        stream, scalars = self.stream, []
        for n in numels:
            cast = stream.alloc(n * nbytes, Category.TEMPORARIES, "gradient norm")
            scalars.append(stream.alloc(max(nbytes, FLOAT32), Category.TEMPORARIES, "gradient norm"))
            stream.free(cast)
        stream.free(*scalars)

    def communication_dtypes(self) -> dict[int, str]:
        """base_optimizer.py:get_param_comm_dtype: one dtype, or under torch_autocast the autocast dtype for parameters of modules that are
        safe in it and their own for the others."""
        if not self.zero.torch_autocast:
            return dict.fromkeys(range(len(self.numel)), self.comm_dtype)
        low = self.job.precision.autocast or "bfloat16"
        modules = self.trace.modules
        return {i: low if modules[p.module].cls in _AUTOCAST_MODULES else self.dtype for i, p in enumerate(self.trace.params)}

    def optimizer_states(self) -> list[OptimizerStates]:
        return self.optimizers

    # gradients -----------------------------------------------------------------------------------------------------
    def own(self, handle: int) -> Storage:
        return Storage(self.stream, handle)

    def begin_micro_batch(self, last: bool) -> None:
        self.boundary = last

    # host ----------------------------------------------------------------------------------------------------------
    def pinned(self, nbytes: int) -> int:
        """Host bytes of one buffer: torch's pinned allocator rounds each block up to a power of two (CachingHostAllocator.h)."""
        if not self.zero.offload_pin_memory or nbytes <= 0:
            return nbytes
        return 1 << (nbytes - 1).bit_length()

    def keep_host(self, label: str, nbytes: int) -> None:
        self.host[label] = self.host.get(label, 0) + nbytes

    def host_moments(self, numels: Sequence[int]) -> None:
        """Optimizer states on the host appear in the first step; they are pageable."""
        if not self._host_moments:
            self._host_moments = True
            for label in ("exp_avg", "exp_avg_sq"):
                self.keep_host(label, dtype_bytes(self.moment_dtype) * sum(numels))

    def mark_host(self, phase: str, transient: dict[str, int] | None = None) -> None:
        """Record the host bytes of a phase."""
        if self.host or transient:
            self.host_phases.append(HostPhase(phase, {**self.host, **(transient or {})}))


def master_dtype(zero: ZeroSpec) -> str:
    """base_optimizer.py:_configure_master_weights."""
    if zero.bf16_master_weights_and_grads:
        return "bfloat16"
    return "float16" if zero.fp16_master_weights_and_grads else "float32"


def parameter_groups(job: JobSpec, trace: StepTrace) -> list[list[int]]:
    """Trainable parameters as the optimizer's param_groups hold them: one group, or the Trainer's two (weight decay, none) when
    the Trainer builds the optimizer itself. Raises InputError when nothing is trainable."""
    trainable = [i for i, p in enumerate(trace.params) if p.requires_grad and p.numel > 0]
    if not trainable:
        raise InputError("no parameter of the model is trainable", help="unfreeze one, or train adapters")
    if job.loop not in TRAINER_LOOPS or job.optimizer.implementation in ("deepspeed_fused", "cpu"):
        return [trainable]

    def decays(index: int) -> bool:
        p = trace.params[index]
        return not _NO_DECAY_NAME.search(p.name) and "LayerNorm" not in trace.modules[p.module].cls

    groups = [[i for i in trainable if decays(i)], [i for i in trainable if not decays(i)]]
    return [g for g in groups if g]
