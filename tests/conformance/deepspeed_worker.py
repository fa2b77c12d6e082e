"""Runs the unmodified DeepSpeed engine on fake tensors, one process for many cases, and writes what its device and host held.

    python deepspeed_worker.py CASES.json OUT.pickle

The device is PyTorch's Python PrivateUse1 backend, the process group torch's "fake" one: any world size, any rank, no GPU. Beside the
engine's phases each case returns the StepTrace of the plain module, taken in the same process by launchguard's own tracer with its
CUDA corrections off, so that both sides make the same choices and only the strategy's rules differ.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from worker_results import write_results

DEVICE = "simgpu"
CASE: dict[str, Any] = dict(
    model="mlp", stage=0, dtype="bf16", offload="none", gas=1, iters=2, world=2, rank=0, bucket=100_000, prefetch=50_000, persist=0,
    optimizer="AdamW", optimizer_params={}, zero={}, top={}, zero_init=False, freeze="", checkpoint=False, width=129, layers=4, casts=False,
)  # fmt: skip
KEPT: list[Any] = []
RANDOM = {"uniform_", "normal_", "trunc_normal_", "random_", "bernoulli_", "exponential_"}


def start(world: int, rank: int, casts: bool = False) -> Any:
    """Fake accelerator, fake process group; returns the FakeTensorMode. Once per process: `set_rank` changes place later.
    casts: autocast casts what goes into ops, as launchguard's trace has CUDA's lists; else DeepSpeed acts and ops are not cast."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_SIZE="8",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", TOKENIZERS_PARALLELISM="false")  # fmt: skip
    import torch
    import torch.distributed._tools.fake_collectives
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    backend = type("Backend", (_DummyBackendModule,), {"get_amp_supported_dtype": lambda s: dtypes})
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=backend())
    if casts:
        _cast_in_autocast()
    else:
        autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
        autocast.fallback(torch.library.fallthrough_kernel)
        KEPT.append(autocast)
    torch.set_num_threads(1)
    torch.cuda.get_device_capability = lambda *a, **k: (9, 0)  # type: ignore[assignment,misc]
    _fake_accelerator(world)
    _stub_native_ops()
    set_rank(world, rank)
    return FakeTensorMode(allow_non_fake_inputs=True)


def _cast_in_autocast() -> None:
    import torch

    from launchguard.trace.cuda_semantics import Card, Semantics

    semantics = Semantics(Card((9, 0), 132, 2048, (2, 13)))
    semantics._install_autocast()
    torch.clear_autocast_cache = semantics._clear_autocast_cache(torch.clear_autocast_cache)
    KEPT.append(semantics)


def _fake_accelerator(world: int) -> None:
    import torch
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    original, name = torch.tensor, f"{DEVICE}:0"

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        t = original(data, *args, **kwargs)
        return t if device is None or str(device) == "cpu" else torch.empty(t.shape, dtype=t.dtype, device=device)

    def typed(dtype: torch.dtype) -> property:
        return property(lambda self: lambda x: tensor(x, dtype=dtype, device=name))

    answers: dict[str, Any] = dict(
        device_name=lambda s, i=None: DEVICE if i is None else f"{DEVICE}:{i}", current_device_name=lambda s: name,
        current_device=lambda s: 0, device_count=lambda s: min(world, 8), device=lambda s, i=None: torch.device(name),
        is_available=lambda s: True, on_accelerator=lambda s, t: t.device.type == DEVICE, is_fp16_supported=lambda s: True,
        is_bf16_supported=lambda s: True, available_memory=lambda s, i=None: 1 << 50, total_memory=lambda s, i=None: 1 << 50,
        memory_stats=lambda s, i=None: {}, pin_memory=lambda s, t, make_copy=True, match_shape=True: t.clone(),
        FloatTensor=typed(torch.float), ByteTensor=typed(torch.uint8), IntTensor=typed(torch.int),
    )  # fmt: skip
    accelerator = type("FakeAccelerator", (CPU_Accelerator,), answers)()
    accelerator._name, accelerator._communication_backend_name = DEVICE, "fake"
    set_accelerator(accelerator)
    import deepspeed.runtime.zero.partition_parameters as partition_parameters
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    partition_parameters._orig_torch_tensor = torch.tensor = tensor  # type: ignore[assignment]
    for module in (partition_parameters, coordinator):
        module.assert_ints_same_as_other_ranks = lambda *a, **k: None
    torch.nn.Module.to = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]


def _stub_native_ops() -> None:
    """C++ ops update in place and allocate nothing; without stubs they would be compiled first."""
    import deepspeed.ops.adam.multi_tensor_apply as multi_tensor
    import deepspeed.ops.op_builder as builders

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    stub = type("Stub", (), {"__getattr__": lambda s, k: lambda *a, **kw: None})
    for name in ("CPUAdamBuilder", "FusedAdamBuilder", "FusedLambBuilder", "FusedLionBuilder", "CPULionBuilder", "CPUAdagradBuilder"):
        if getattr(builders, name, None) is not None:
            getattr(builders, name).load = lambda self, verbose=True: stub()
    multi_tensor.MultiTensorApply.__call__ = lambda self, *a, **k: None


def set_rank(world: int, rank: int) -> None:
    """Make this process `rank` of `world`."""
    import deepspeed.comm.comm as comm
    import torch.distributed as dist
    from deepspeed.utils import groups
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    comm.cdb = sys.modules["deepspeed.comm.torch"].TorchBackend("fake", timedelta(seconds=60), None)
    for name, value in vars(groups).items():  # process groups of the last world
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)


class Books:
    """Live bytes by device: a storage is born at the first op output that carries it, and dies with its weak reference."""

    def __init__(self) -> None:
        self.refs: dict[int, Any] = {}
        self.log: list[tuple[int, int, bool]] = []  # (bytes, storage, host)
        self.phases: list[tuple[str, int]] = []

    def mode(self) -> Any:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        books = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
                    dtype = args[0].dtype
                    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
                if func._opname in RANDOM:
                    return args[0]
                out = func(*args, **(kwargs or {}))
                for t in tree_leaves(out):
                    if isinstance(t, torch.Tensor) and t.device.type != "meta":
                        books.see(t)
                return out

        return Mode()

    def see(self, t: Any) -> None:
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes == 0 or (key in self.refs and self.refs[key]() is not None):
            return
        self.refs[key] = weakref.ref(storage, lambda _, key=key, nbytes=nbytes: self._died(key, nbytes))
        self.log.append((nbytes, key, t.device.type == "cpu"))

    def _died(self, key: int, nbytes: int) -> None:
        self.refs.pop(key, None)
        self.log.append((-nbytes, key, False))

    def mark(self, name: str) -> None:
        self.phases.append((name, len(self.log)))

    def report(self) -> list[dict[str, Any]]:
        """Per phase: peak of the device, bytes at its end on device and host."""
        place: dict[int, bool] = {}
        live = [0, 0]
        rows = []
        for (name, low), (_, high) in zip(self.phases, [*self.phases[1:], ("", len(self.log))]):
            peak, host_peak = live[0], live[1]
            for nbytes, key, host in self.log[low:high]:
                if nbytes > 0:
                    place[key] = host
                live[place[key]] += nbytes
                peak, host_peak = max(peak, live[0]), max(host_peak, live[1])
            rows.append(dict(phase=name, peak=peak, end=live[0], host_peak=host_peak, host_end=live[1]))
        return rows


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON of a case."""
    zero = {"stage": case["stage"], "reduce_bucket_size": case["bucket"], "stage3_prefetch_bucket_size": case["prefetch"],
            "stage3_param_persistence_threshold": case["persist"]}  # fmt: skip
    if case["offload"] in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if case["offload"] in ("param", "both"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["gas"],
        "zero_optimization": {**zero, **case["zero"]},
        "optimizer": {"type": case["optimizer"], "params": {"lr": 1e-3, **case["optimizer_params"]}},
        **case["top"],
    }
    if case["dtype"] != "fp32":
        config[case["dtype"]] = {"enabled": True, **case["top"].get(case["dtype"], {})}
    return config


def build(case: dict[str, Any]) -> Any:
    import torch

    if case["model"] == "mlp":
        widths = [33] + [case["width"]] * (case["layers"] - 1) + [7]
        layers: list[torch.nn.Module] = []
        for a, b in zip(widths, widths[1:]):
            layers += [torch.nn.Linear(a, b), torch.nn.LayerNorm(b)]
        model: Any = torch.nn.Sequential(*layers)
    else:
        import transformers

        if case["model"] == "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
                n_layer=2, n_embd=64, n_head=4, vocab_size=515, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False,
                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))  # fmt: skip
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                num_hidden_layers=3, hidden_size=96, intermediate_size=200, use_cache=False, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=515, max_position_embeddings=64, tie_word_embeddings=False))  # fmt: skip
    for name, p in model.named_parameters():
        p.requires_grad_(not case["freeze"] or case["freeze"] in name)
    if case["checkpoint"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run_model(case: dict[str, Any], call: Callable[..., Any]) -> Any:
    """Loss of one micro-batch; the inputs are made here and die here."""
    import torch

    if case["model"] == "mlp":
        dtype = {"bf16": torch.bfloat16, "fp16": torch.half, "fp32": torch.float}[case["dtype"]]
        return call(torch.ones(6, 33, device=DEVICE, dtype=dtype)).float().pow(2).mean()
    x = torch.ones(2, 16, device=DEVICE, dtype=torch.long)
    return call(input_ids=x, labels=x).loss


def trace_of(case: dict[str, Any], mode: Any) -> Any:
    """StepTrace of the plain module, without the corrections that turn fake tensors' choices into CUDA's."""
    import torch

    from launchguard.trace import capture
    from launchguard.trace.zero3_linear import zero3_linear

    capture.SCRATCH = {}  # type: ignore[attr-defined]
    capture.Tracker._taken_over = lambda self, func, args: None  # type: ignore[method-assign,assignment]
    books = Books()
    with mode, books.mode(), torch.device(DEVICE):
        model = build(case)
        cast(case, model)
    with zero3_linear(case["casts"] and case["stage"] == 3):
        return capture.capture(mode, model, dict, lambda m, batch: (run_model(case, _region(case, m)), None), None, lambda text: None, {})  # type: ignore[arg-type]


def _region(case: dict[str, Any], model: Any) -> Any:
    """The module as engine.forward calls it: within the autocast region."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return model(*args, **kwargs)

    return call if case["casts"] else model


def cast(case: dict[str, Any], model: Any) -> None:
    """What deepspeed.initialize does to parameters that are still on the host."""
    import torch

    for p in model.parameters() if case["dtype"] != "fp32" else ():
        p.data = p.data.to(torch.bfloat16 if case["dtype"] == "bf16" else torch.half)


def run_engine(case: dict[str, Any], mode: Any, books: Books) -> list[dict[str, Any]]:
    """deepspeed.initialize and `iters` optimizer steps under the books."""
    import deepspeed
    import torch

    deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # a job is a process: an engine before this one left it set
    config = config_of(case)
    place: Any = deepspeed.zero.Init(config_dict_or_path=config) if case["zero_init"] else torch.device(DEVICE)
    linear = torch.nn.functional.linear
    with mode, books.mode():
        books.mark("model")
        with place:
            model = build(case)
        if not case["zero_init"]:
            cast(case, model)
        books.mark("prepare")
        trainable = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
        for n in range(case["iters"]):
            for i in range(case["gas"]):
                books.mark(f"forward_{n}.{i}")
                loss = run_model(case, engine)
                books.mark(f"backward_{n}.{i}")
                engine.backward(loss)
                del loss
                books.mark(f"step_{n}.{i}")
                engine.step()
            books.mark(f"idle_{n}")
        rows = books.report()
        engine.destroy()
    torch.nn.functional.linear = linear  # ZeRO-3 replaces it for the life of the process
    del engine, model
    gc.collect()
    return rows


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """DeepSpeed prints to stdout and stderr at will."""
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        yield


def main(cases_file: str, out_file: str) -> None:
    with open(cases_file) as f:
        cases = [{**CASE, **c} for c in json.load(f)]
    place = (cases[0]["world"], cases[0]["rank"])
    mode = start(*place, cases[0]["casts"])

    def fill(case: dict[str, Any], result: Any) -> None:
        nonlocal place
        if (case["world"], case["rank"]) != place:
            place = (case["world"], case["rank"])
            set_rank(*place)
        with _silent():
            result.trace = trace_of(case, mode)
            result.phases = run_engine(case, mode, Books())

    write_results(cases, fill, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a Python PrivateUse1 backend aborts at interpreter exit
