"""What must be known about each library: its phase marks, and its helpers that need values, peers or a native compiler.

Each function is called once, right after the module of its name was imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from launchguard.rehearsal.inside.peers import Peers, with_result
from launchguard.rehearsal.inside.phases import Recorder
from launchguard.rehearsal.inside.values import Values

OP_BUILDERS = ("CPUAdamBuilder", "FusedAdamBuilder", "FusedLambBuilder", "FusedLionBuilder", "CPULionBuilder", "CPUAdagradBuilder")


class Libraries:
    def __init__(self, recorder: Recorder, values: Values, peers: Peers) -> None:
        self.recorder, self.values, self.peers = recorder, values, peers

    def install(self) -> None:
        callbacks: dict[str, Callable[[Any], None]] = {
            "accelerate.accelerator": self.accelerator,
            "deepspeed": self.deepspeed,
            "deepspeed.comm.torch": self.deepspeed_comm,
            "deepspeed.ops.adam.multi_tensor_apply": self.multi_tensor_apply,
            "deepspeed.ops.op_builder": self.op_builders,
            "deepspeed.runtime.engine": self.engine,
            "deepspeed.runtime.zero.partition_parameters": self.zero3,
            "deepspeed.runtime.zero.partitioned_param_coordinator": self.zero3,
            "torch.distributed.checkpoint.utils": self.distributed_checkpoint,
            "torch.distributed.fsdp.fully_sharded_data_parallel": self.fsdp1,
            "torch.nn.parallel.distributed": self.ddp,
            "transformers.masking_utils": self.masking,
            "transformers.trainer": self.trainer,
        }
        after_import(callbacks)

    # -------------------------------------------------------- Hugging Face
    def accelerator(self, module: Any) -> None:
        for name, phase in (("prepare", "prepare"), ("save_state", "save"), ("save_model", "save"), ("get_state_dict", "save")):
            self.recorder.wrap(module.Accelerator, name, phase)

    def trainer(self, module: Any) -> None:
        for name in ("_save_checkpoint", "save_model"):
            self.recorder.wrap(module.Trainer, name, "save", "idle")
        self.recorder.wrap(module.Trainer, "evaluate", "eval", "idle")

    def masking(self, module: Any) -> None:
        """transformers >= 5 asks fast_all, older versions .all() (masking_utils.py)."""
        original = getattr(module, "fast_all", None)
        if original is not None:
            module.fast_all = lambda x: self.values.nothing_is_padded(original(x))

    # -------------------------------------------------------- DeepSpeed
    def deepspeed(self, module: Any) -> None:
        import torch._dynamo  # noqa: F401  (cannot be imported once zero.Init has replaced Tensor.__new__)

        self.recorder.wrap(module, "initialize", "prepare")

    def engine(self, module: Any) -> None:
        engine = module.DeepSpeedEngine
        self.recorder.wrap(engine, "backward", "backward", "after_backward")
        self.recorder.wrap(engine, "step", "step", "idle", when=lambda self, *a, **k: self.is_gradient_accumulation_boundary())
        for name in ("save_checkpoint", "save_16bit_model"):
            self.recorder.wrap(engine, name, "save")

    def op_builders(self, module: Any) -> None:
        """Native optimizers update in place and allocate nothing on the device: nothing is compiled, nothing updated."""
        nothing = type("NoOp", (), {"__getattr__": lambda self, name: lambda *args, **kwargs: None})
        for name in OP_BUILDERS:
            if getattr(module, name, None) is not None:
                getattr(module, name).load = lambda self, verbose=True: nothing()

    def multi_tensor_apply(self, module: Any) -> None:
        module.MultiTensorApply.__call__ = lambda self, *args, **kwargs: None

    def deepspeed_comm(self, module: Any) -> None:
        module.build_shm_op = lambda: None

    def zero3(self, module: Any) -> None:
        """Compares with what rank 0 broadcast; nobody did."""
        module.assert_ints_same_as_other_ranks = lambda *args, **kwargs: None

    # -------------------------------------------------------- torch
    def fsdp1(self, module: Any) -> None:
        self.recorder.wrap(module.FullyShardedDataParallel, "__init__", "prepare")

    def distributed_checkpoint(self, module: Any) -> None:
        """A coordinator plans it with every rank's part; alone, each rank plans and finds its own."""
        cls, init = module._DistWrapper, module._DistWrapper.__init__

        @functools.wraps(init)
        def alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
            init(self, group, False, coordinator_rank)

        cls.__init__ = alone

    def ddp(self, module: Any) -> None:
        """The fake group's work carries no result, so the reducer's own all-reduce is done by hand, by the plainest hook, unless the script
        has registered one of its own before the first forward."""
        cls, peers = module.DistributedDataParallel, self.peers
        init, register, before_forward = cls.__init__, cls.register_comm_hook, cls._pre_forward
        hooked = WeakSet[Any]()

        @functools.wraps(init)
        def initialised(ddp: Any, *args: Any, **kwargs: Any) -> None:
            peers.communicates(kwargs.get("process_group"))
            init(ddp, *args, **kwargs)

        def register_comm_hook(ddp: Any, state: object, hook: Callable[..., Any]) -> None:
            register(ddp, state, peers.with_results(hook))
            hooked.add(ddp)

        def register_builtin_comm_hook(ddp: Any, kind: Any) -> None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

            register_comm_hook(ddp, None, hooks.fp16_compress_hook if kind == dist.BuiltinCommHookType.FP16_COMPRESS else _reduced)

        def pre_forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if ddp not in hooked:
                register(ddp, None, _reduced)
                hooked.add(ddp)
            return before_forward(ddp, *args, **kwargs)

        cls.__init__, cls.register_comm_hook, cls._pre_forward = initialised, register_comm_hook, pre_forward
        cls._register_builtin_comm_hook = register_builtin_comm_hook
        self.recorder.wrap(cls, "__init__", "prepare")


def _reduced(state: Any, bucket: Any) -> Any:
    return with_result(bucket.buffer(), bucket.buffer())


_reduced.__annotations__.clear()  # torch compares them with the class dist.GradBucket, and ours are text


# ---------------------------------------------------------------- after an import
def after_import(callbacks: dict[str, Callable[[Any], None]]) -> None:
    """Call each function with its module: now if it is imported already, else right after it was."""
    for name in [name for name in callbacks if name in sys.modules]:
        callbacks.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(callbacks))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self.callbacks, self.busy = callbacks, set[str]()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.callbacks or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is not None and spec.loader is not None:
            execute, callback = spec.loader.exec_module, self.callbacks[name]

            def exec_module(module: Any) -> None:
                execute(module)
                callback(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
