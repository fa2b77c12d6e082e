"""DeepSpeed without ZeRO: plain data parallelism in float32, and stage 0's 16-bit optimizer wrappers (deepspeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Iterable

from launchguard.events import Category
from launchguard.strategies._zero_base import BOUNDARY_BUCKET, FLOAT32, ZeroEngine
from launchguard.strategies._zero_flat import FlatGroup
from launchguard.strategies.optimizer_step import OptimizerStates, SteppedTensor


class ReplicatedEngine(ZeroEngine):
    """Stage 0 in float32: the basic optimizer steps the model's own parameters (engine.py:_configure_optimizer)."""

    def prepare(self) -> None:
        self.grads: dict[int, int] = {}
        self.model_to_device()
        self.overflow_flag()
        self.wrap()

    def wrap(self) -> None:
        self.optimizers = [self.optimizer_over(self.dtype)]

    def optimizer_over(self, dtype: str) -> OptimizerStates:
        """One optimizer over whole tensors, in the param groups of the job."""
        tensors = [[SteppedTensor(self.trace.params[i].shape, dtype) for i in group] for group in self.groups]
        return OptimizerStates(self.stream, self.job.optimizer, tensors)

    def grad(self, param: int, handle: int) -> None:
        """Gradients stay until the step; those of later micro-batches are added in place."""
        if param in self.grads:
            self.stream.free(handle)
        else:
            self.grads[param] = handle

    def backward_end(self) -> None:
        if self.boundary:
            params = [i for i in range(len(self.numel)) if self.trace.params[i].requires_grad and self.numel[i]]
            self.reduce_at_boundary([self.numel[i] for i in params], self.b)

    def reduce_at_boundary(self, numels: Iterable[int], nbytes: int) -> None:
        """engine.py:buffered_allreduce_fallback: buckets of MEMORY_OPT_ALLREDUCE_SIZE elements plus the tensor that overflows them;
        a copy each, unless the bucket is one tensor, and another in the communication dtype."""
        bucket: list[int] = []
        for n in numels:
            bucket.append(n)
            if sum(bucket) > BOUNDARY_BUCKET:
                self._allreduce(bucket, nbytes)
                bucket = []
        self._allreduce(bucket, nbytes)

    def _allreduce(self, bucket: list[int], nbytes: int) -> None:
        total = sum(bucket)
        flat = self.stream.alloc(total * nbytes if len(bucket) > 1 else 0, Category.COMMUNICATION, "reduce copy")
        cast = self.stream.alloc(total * self.comm if self.comm_itemsize_differs(nbytes) else 0, Category.COMMUNICATION, "reduce copy")
        self.stream.free(cast, flat)

    def comm_itemsize_differs(self, nbytes: int) -> bool:
        """Is the communication dtype another one than that of the gradients (of `nbytes` each)?"""
        return self.comm_dtype != (self.dtype if nbytes == self.b else "float32")

    def step(self) -> None:
        """engine.py:_take_model_step; clipping takes norms of float32 gradients, no copies (utils.py:clip_grad_norm_)."""
        if self.job.max_grad_norm:
            self.norms([self.numel[i] for i in self.grads], 0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.free_grads()

    def free_grads(self) -> None:
        self.stream.free(*self.grads.values())
        self.grads = {}


class FusedHalfEngine(ReplicatedEngine):
    """bf16 or fp16 with FusedAdam: fp16/fused_optimizer.py:FP16_Optimizer, one flat master copy per group."""

    def wrap(self) -> None:
        stream = self.stream
        self.totals = [sum(self.numel[i] for i in group) for group in self.groups]
        for group, total in zip(self.groups, self.totals):
            clones = [stream.alloc(self.param_bytes(i), Category.TEMPORARIES, "flattening") for i in group]
            flat = total * self.b if len(group) > 1 else 0  # one tensor flattens to a view of its clone
            stream.alloc(flat, Category.PARAMETERS, f"flat {self.word} parameters")
            if flat:
                stream.free(*clones)
            stream.free(*(self.model.pop(i) for i in group))
            clone = stream.alloc(total * self.b, Category.TEMPORARIES, "flattening")
            stream.alloc(total * FLOAT32, Category.OPTIMIZER_STATES, "fp32 master weights")
            stream.free(clone)
        self.optimizers = [self.optimizer_of(self.totals)]
        self.first_step([n * FLOAT32 for n in self.totals])

    def first_step(self, grad_bytes: Iterable[int]) -> None:
        """initialize_optimizer_states: a step with zero gradients inside __init__, so that states exist before training."""
        grads = [self.stream.alloc(n, Category.GRADIENTS, "fp32 gradients") for n in grad_bytes]
        for optimizer in self.optimizers:
            optimizer.step()
        self.stream.free(*grads)

    def step(self) -> None:
        """FP16_Optimizer.step: every gradient is cast, the casts are flattened, and only then the 16-bit gradients go."""
        stream, flats = self.stream, []
        for group, total in zip(self.groups, self.totals):
            casts = [stream.alloc(self.numel[i] * FLOAT32, Category.GRADIENTS, "fp32 gradients") for i in group]
            if len(group) > 1:
                flats.append(stream.alloc(total * FLOAT32, Category.GRADIENTS, "flat fp32 gradients"))
                stream.free(*casts)
            else:
                flats += casts
            stream.free(*(self.grads.pop(i, 0) for i in group))
        for optimizer in self.optimizers:
            optimizer.step()
        stream.free(*flats)


class UnfusedHalfEngine(FusedHalfEngine):
    """bf16 or fp16 with any other optimizer: fp16/unfused_optimizer.py:FP16_UnfusedOptimizer, a master copy per parameter."""

    def wrap(self) -> None:
        stream = self.stream
        params = [i for group in self.groups for i in group]
        for i in params:
            clone = stream.alloc(self.param_bytes(i), Category.TEMPORARIES, "flattening")
            stream.alloc(self.numel[i] * FLOAT32, Category.OPTIMIZER_STATES, "fp32 master weights")
            stream.free(clone)
        self.optimizers = [self.optimizer_over("float32")]
        self.first_step([self.numel[i] * self.b for i in params] + [self.numel[i] * FLOAT32 for i in params])

    def step(self) -> None:
        """FP16_UnfusedOptimizer.step: both copies of the gradients live through the step."""
        stream = self.stream
        params = [i for group in self.groups for i in group]
        for group in self.groups:  # utils.py:get_weight_norm
            self.norms([self.numel[i] for i in group], FLOAT32)
        casts = [stream.alloc(self.numel[i] * FLOAT32, Category.GRADIENTS, "fp32 gradients") for i in params]
        for optimizer in self.optimizers:
            optimizer.step()
        stream.free(*casts)
        self.free_grads()


class Bf16Engine(ReplicatedEngine):
    """Stage 1 in bf16 with float32 accumulation and no offload: bf16_optimizer.py:BF16_Optimizer.

    The float32 gradients are one flat buffer of the whole model on every rank; only master weights and states are partitioned.
    """

    def wrap(self) -> None:
        stream = self.stream
        self.flat = [FlatGroup(group, self.numel, self.world) for group in self.groups]
        for group in self.flat:
            stream.alloc(group.padded * self.b, Category.PARAMETERS, "flat bf16 parameters")
            stream.free(*(self.model.pop(i) for i in group.order))
            clone = stream.alloc(group.size * self.b, Category.TEMPORARIES, "flattening")
            stream.alloc(group.size * FLOAT32, Category.OPTIMIZER_STATES, "fp32 master partition")
            stream.free(clone)
            stream.alloc(group.padded * self.acc, Category.GRADIENTS, "fp32 gradients of the whole model")
        self.optimizers = [self.optimizer_of([g.size for g in self.flat])]

    def grad(self, param: int, handle: int) -> None:
        if self.zero.immediate_grad_update:  # accumulate_hp_grads_and_remove_lp
            self.stream.touch(self.numel[param] * self.acc, Category.GRADIENTS, "fp32 gradients")
            self.stream.free(handle)
        else:
            super().grad(param, handle)

    def backward_end(self) -> None:
        """update_hp_grads adds a cast of each gradient; the 16-bit ones stay (zeroed, not freed, before the next backward)."""
        for i in self.grads:
            self.stream.touch(self.numel[i] * self.acc, Category.GRADIENTS, "fp32 gradients")
        if self.boundary:
            self.reduce_at_boundary([g.padded for g in self.flat], self.acc)

    def step(self) -> None:
        """Norms need no cast in float32; master gradients are views of the flat buffer."""
        self.norms([self.numel[i] for g in self.flat for i in g.order], 0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.free_grads()
