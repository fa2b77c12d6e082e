"""Runs the unmodified FSDP1 and FSDP2 on fake tensors, one process for many cases, and writes what the device held, stream by stream.

    python fsdp_worker.py CASES.json OUT.pickle

The device is PyTorch's Python PrivateUse1 backend with stub streams, the process group torch's "fake" one: any world size, any rank, no
GPU. Beside the phases each case returns the StepTrace of the plain module in the compute dtype, taken in the same process by launchguard's
own tracer with its CUDA corrections off (kernel scratch, autograd's in-place sums, which tensor subclasses do not get): both sides then
make the same choices and only the strategy's rules differ. What fake tensors cannot show: autograd runs a node on the stream of its
forward, which needs a real device; those streams were checked on virtual GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import fsdp_sides
from worker_results import write_results

DEVICE = "simgpu"
CASE: dict[str, Any] = dict(
    kind="fsdp2", model="tiny", storage="float32", compute="float32", reduce="float32", world=2, rank=0, reshard=True, gas=1, sync=False,
    replicate=1, tied=False, freeze="", checkpoint="", grouping=False, offload=False, strategy="FULL_SHARD", orig=False, prefetch=None,
    forward_prefetch=False, wrap="layers", load="", clip=False, sync_states=False, lora=False, targets=("up", "down"),
    width=37, vocabulary=203, hidden=36, quant="", limit=True,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ the device
class Stream:
    """A stream by number; waiting is nothing."""

    count = 0
    current: Stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = Stream.count
        Stream.count += 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: Event()


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = Stream.current
    Stream.current = stream or before
    try:
        yield
    finally:
        Stream.current = before


def start() -> Any:
    """Register the device; returns the FakeTensorMode."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", FSDP_SKIP_WRITEBACK_CHECK="1")  # it compares data pointers, which fakes lack
    import torch
    import torch.distributed._tools.fake_collectives
    import torch.distributed.fsdp
    import torch.distributed.fsdp._common_utils as common
    import torch.distributed.fsdp._flat_param as flat_param
    import torch.distributed.fsdp._runtime_utils as runtime
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    Stream.current = Stream()
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    module = type("Backend", (_DummyBackendModule,), {
        "Stream": Stream, "Event": Event, "stream": staticmethod(on_stream), "current_stream": lambda s, *a: Stream.current,
        "set_device": lambda s, i: None, "synchronize": lambda s, *a: None, "get_amp_supported_dtype": lambda s: dtypes,
    })  # fmt: skip
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=module())
    torch.set_num_threads(1)
    torch.accelerator.current_stream = lambda *args: Stream.current  # type: ignore[assignment]
    torch.nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    fully_shard, mesh_info = torch.distributed.fsdp._fully_shard._fully_shard, torch.distributed.fsdp._fully_shard._fsdp_init

    def real_mesh(*args: Any) -> Any:  # it reads rank numbers
        with torch.utils._python_dispatch._disable_current_modes():
            return mesh_info._get_post_forward_mesh_info(*args)

    fully_shard._get_post_forward_mesh_info = real_mesh
    FakeTensor.data_ptr = lambda t: t.untyped_storage()._cdata + t.storage_offset() * t.itemsize  # type: ignore[method-assign]
    for place in (common, flat_param, runtime):  # a hint to the caching allocator; needs a real stream
        place._no_dispatch_record_stream = lambda tensor, stream: None
    return FakeTensorMode(allow_non_fake_inputs=True)


def enter_world(world: int, rank: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


class Books:
    """Live bytes of the device by phase: a storage is born at the first op output that carries it or when it is resized, and dies with
    its weak reference or when it is resized to nothing."""

    def __init__(self) -> None:
        self.refs: dict[int, Any] = {}
        self.held: dict[int, int] = {}
        self.log: list[tuple[int, int]] = []  # (bytes gained or lost, stream it was allocated on)
        self.stream: dict[int, int] = {}
        self.phases: list[tuple[str, int]] = []
        self.paused = 0
        self.absent: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Tensors that stand for some on the host: fake tensors cannot change device through `.data`."""
        for storage in [t.untyped_storage() for t in tensors]:
            self.refs[storage._cdata] = weakref.ref(storage, functools.partial(self._died, storage._cdata))
            self.absent.add(storage._cdata)

    def move(self, tensors: Any) -> None:
        """What `_move_states_to_device` does to tensors on the host."""
        import torch

        for t in tensors:
            if t.untyped_storage()._cdata in self.absent:
                t.data = torch.empty_like(t)

    def see(self, t: Any) -> None:
        import torch

        local = getattr(t, "_local_tensor", t)
        if local.device.type != DEVICE or self.paused or not isinstance(local, torch.Tensor):
            return
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self.refs and self.refs[key]() is not None:
            return
        self.refs[key] = weakref.ref(storage, functools.partial(self._died, key))
        self._set(key, storage.nbytes())

    def _set(self, key: int, nbytes: int) -> None:
        if key in self.absent:
            return
        change = nbytes - self.held.get(key, 0)
        if change > 0:
            self.stream[key] = Stream.current.number
        if change:
            self.log.append((change, self.stream[key]))
        self.held[key] = nbytes

    def _died(self, key: int, _: Any) -> None:
        self._set(key, 0)
        self.refs.pop(key, None)
        self.held.pop(key, None)
        self.absent.discard(key)

    def mark(self, name: str) -> None:
        self.phases.append((name, len(self.log)))

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Watch every op and every resize. DTensor infers shapes with full-size fakes (ShardingPropagator): those are not booked."""
        import torch
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        books, resize = self, torch.UntypedStorage.resize_
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(kind is DTensor for kind in kinds):
                    return NotImplemented
                if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
                    return 1.0 if args[0].dtype.is_floating_point else 0
                if func is torch.ops.fsdp.chunk_cat.default:  # one kernel on CUDA; elsewhere a fallback with temporaries
                    return None
                out = func(*args, **(kwargs or {}))
                for t in tree_leaves(out):
                    if isinstance(t, torch.Tensor):
                        books.see(t)
                return out

        def resized(storage: Any, size: int) -> None:
            resize(storage, size)
            if storage._cdata in books.refs:
                books._set(storage._cdata, storage.nbytes())

        def quietly(*args: Any, **kwargs: Any) -> Any:
            books.paused += 1
            try:
                return infer(*args, **kwargs)
            finally:
                books.paused -= 1

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = quietly  # type: ignore[method-assign]
        try:
            with Mode():
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = infer  # type: ignore[method-assign]

    def report(self) -> list[dict[str, Any]]:
        """Per phase: peak, end, and the peak of each stream's own bytes."""
        live, by_stream, rows = 0, dict.fromkeys(range(Stream.count), 0), []
        for (name, low), (_, high) in zip(self.phases, [*self.phases[1:], ("", len(self.log))]):
            peak, peaks = live, dict(by_stream)
            for change, stream in self.log[low:high]:
                live += change
                by_stream[stream] += change
                peak, peaks[stream] = max(peak, live), max(peaks[stream], by_stream[stream])
            rows.append(dict(phase=name, peak=peak, end=live, streams=sorted((n for n in peaks.values() if n), reverse=True)))
        return rows


# ------------------------------------------------------------------------------------------------ the models
def _tiny(case: dict[str, Any]) -> Any:
    """Embedding, blocks of odd sizes (so that padding matters), norm, head. No attention, no dropout: every device runs the same ops."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Tiny(nn.Module):
        _no_split_modules = ["Block"]
        base_model_prefix = ""

        def __init__(self, width: int = case["width"], vocabulary: int = case["vocabulary"]) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Block(width) for _ in range(3))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False, device="meta" if case["tied"] else None)
            if case["tied"]:
                self.head.weight = self.embed.weight

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                if case["checkpoint"] in ("reentrant", "model"):
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=case["checkpoint"] == "reentrant")
                else:
                    x = layer(x)
            return self.head(self.norm(x))

    return Tiny()


def build(case: dict[str, Any], dtype: str) -> Any:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model = _llama(case) if case["model"] == "llama" else _tiny(case)
    finally:
        torch.set_default_dtype(before)
    if case["quant"]:
        quantise(model, case["quant"])
    for name, p in model.named_parameters():
        p.requires_grad_(p.is_floating_point() and (not case["freeze"] or case["freeze"] in name))
    if case["lora"]:
        from peft import LoraConfig, inject_adapter_in_model

        model = inject_adapter_in_model(LoraConfig(r=3, target_modules=list(case["targets"])), model)
        for p in model.parameters():
            if p.is_floating_point():
                p.data = p.data.to(getattr(torch, dtype))
    return model


def quantise(model: Any, storage: str) -> None:
    """Layers in 4 bits as launchguard's stand-ins of bitsandbytes' class (test_quantisation.py compares the two): a fake tensor cannot
    be of that class. FSDP and PEFT do with them what they do with tensors of that shape and dtype."""
    import torch

    from launchguard.trace import quantized

    quantized._show_stand_in()
    how = {"method": "nf4", "double_quant": True, "quant_storage": storage, "compute_dtype": "bfloat16"}
    for block in model.layers:
        for name in ("up", "down"):
            layer = quantized._quantised(getattr(block, name), how)
            for key, p in [(k, p) for k, p in layer._parameters.items() if p is not None and p.device.type == "meta"]:
                made: Any = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
                made.compress_statistics, made.quant_type = True, "nf4"
                layer._parameters[key] = made
            for key, b in layer._buffers.items():
                assert b is not None
                layer._buffers[key] = torch.empty(b.shape, dtype=b.dtype)
            setattr(block, name, layer)
    model.is_loaded_in_4bit = True


def _llama(case: dict[str, Any]) -> Any:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=case["hidden"], intermediate_size=75, use_cache=False, num_attention_heads=3,
        num_key_value_heads=3, vocab_size=case["vocabulary"], max_position_embeddings=64, tie_word_embeddings=case["tied"],
        attn_implementation="eager"))  # fmt: skip
    if case["checkpoint"] == "model":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run_model(case: dict[str, Any], model: Any, device: str = DEVICE) -> Any:
    """Loss of one micro-batch; the inputs are made here and die here."""
    import torch

    ids = torch.ones(2, 5, device=device, dtype=torch.long)
    if case["model"] == "llama":
        return model(input_ids=ids, labels=ids).loss
    return model(ids).float().pow(2).mean()


def layer_class(model: Any, case: dict[str, Any]) -> type:
    layers = model.model.layers if case["model"] == "llama" else model.layers
    return type(layers[0])


def checkpoint_layers(model: Any, case: dict[str, Any]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

    kind = layer_class(model, case)
    wrapper = functools.partial(checkpoint_wrapper, preserve_rng_state=False)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, kind))


# ------------------------------------------------------------------------------------------------ the two sides
def trace_of(case: dict[str, Any], mode: Any, make_batch: Callable[[], Any] = dict, step: Callable[..., Any] | None = None,
             first: str | None = None) -> Any:  # fmt: skip
    from unittest import mock

    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    from launchguard.trace import capture
    from launchguard.trace.request import _flat
    from launchguard.trace.worker import _facts, _under_fsdp1, cast_adapter_inputs

    capture.SCRATCH = {}  # type: ignore[attr-defined]
    if case["kind"] in ("fsdp1", "fsdp2"):
        capture.Tracker._taken_over = lambda self, func, args: None  # type: ignore[method-assign,assignment]
    with mode, torch.device(DEVICE):
        model = build(case, case["compute"])
        if case["checkpoint"] == "wrapper":
            checkpoint_layers(model, case)
    facts = _facts(model, types.SimpleNamespace(loss=None))  # type: ignore[arg-type]
    step = step or (lambda m, batch: (run_model(case, m), None))
    flat = _flat(fsdp_sides.job_of(case)) if case["kind"] == "fsdp1" else None
    with mock.patch.object(BaseTunerLayer, "_cast_input_dtype", BaseTunerLayer._cast_input_dtype):  # the real side casts by itself
        if flat is not None:
            _under_fsdp1(model, facts, **flat)
        if first is not None:
            cast_adapter_inputs(first)
        trace = capture.capture(mode, model, make_batch, step, None, lambda text: None, facts)  # type: ignore[arg-type]
    return dataclasses.replace(trace, events=_end_inside_backward(trace.events))


def _end_inside_backward(events: Any) -> Any:
    """Autograd's final callbacks run before backward() returns and drops the gradient of the loss (4 bytes); END stands behind that."""
    from launchguard.events import TraceOp

    end = next(k for k, e in enumerate(events) if e.op is TraceOp.END)
    dropped = end - 1
    assert events[dropped].op is TraceOp.FREE
    return (*events[:dropped], events[end], events[dropped], *events[end + 1 :])


def wrap_fsdp2(case: dict[str, Any], model: Any, mesh: Any) -> Any:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy: Any = {"mesh": mesh}
    if case["compute"] != case["storage"]:
        policy["mp_policy"] = MixedPrecisionPolicy(getattr(torch, case["compute"]), getattr(torch, case["reduce"]))
    if case["quant"] == "uint8":  # as accelerate 1.15 fsdp2_prepare_model leaves Params4bit in an integer dtype alone
        policy["ignored_params"] = {p for p in model.parameters() if not p.is_floating_point()}
    if case["offload"]:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    kind = layer_class(model, case)
    if case["checkpoint"] == "wrapper":
        checkpoint_layers(model, case)
    if case["grouping"]:
        return _accelerate(case, model, mesh, policy, kind.__name__)
    for module in [m for m in model.modules() if isinstance(m, kind)]:
        fully_shard(module, reshard_after_forward=case["reshard"], **policy)
    return fully_shard(model, **policy)


def _accelerate(case: dict[str, Any], model: Any, mesh: Any, policy: dict[str, Any], layer: str) -> Any:
    """accelerate's own fsdp2_prepare_model, with as much of an accelerator as it looks at."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=case["reshard"], auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer], mixed_precision_policy=policy.get("mp_policy"),
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    names = types.SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names)
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh=mesh, parallelism_config=names, is_main_process=False,
        mixed_precision="no" if case["compute"] == case["storage"] else "bf16", device=DEVICE,
    )  # fmt: skip
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


def wrap_fsdp1(case: dict[str, Any], model: Any, mesh: Any) -> Any:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy: Any = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer_class(model, case)})
    if case["wrap"] == "peft":
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)
    if case["wrap"] == "size":
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5000)
    mixed = None
    if case["compute"] != case["storage"]:
        mixed = MixedPrecision(getattr(torch, case["compute"]), getattr(torch, case["reduce"]))
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=None if case["wrap"] == "none" else policy, mixed_precision=mixed,
        sharding_strategy=ShardingStrategy[case["strategy"]], use_orig_params=case["orig"], device_id=torch.device(DEVICE, 0),
        backward_prefetch=BackwardPrefetch[case["prefetch"]] if case["prefetch"] else None, forward_prefetch=case["forward_prefetch"],
        cpu_offload=CPUOffload(case["offload"]), device_mesh=mesh if case["replicate"] > 1 else None,
        sync_module_states=case["sync_states"], limit_all_gathers=case["limit"],
    )  # fmt: skip
    if case["checkpoint"] == "wrapper":
        checkpoint_layers(wrapped, case)
    for unit in FullyShardedDataParallel.fsdp_modules(wrapped):  # as accelerate 1.15 accelerator.py:prepare_model upcasts
        if case["load"] and unit._has_params and unit._flat_param.requires_grad:
            unit._flat_param.data = unit._flat_param.data.to(getattr(torch, case["storage"]))
            unit._handle._orig_param_dtype = getattr(torch, case["storage"])
    return wrapped


@contextlib.contextmanager
def without_sync(case: dict[str, Any], model: Any, last: bool) -> Iterator[None]:
    if last or case["sync"]:
        yield
    elif case["kind"] == "fsdp1":
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def run_framework(case: dict[str, Any], mode: Any) -> list[dict[str, Any]]:
    """Wrap, then three optimizer steps."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    Stream.count = 1
    shape, names = (case["world"],), ("shard",)
    if case["replicate"] > 1:
        shape, names = (case["replicate"], case["world"] // case["replicate"]), ("replicate", *names)  # type: ignore[assignment]
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    books = Books()
    with mode, torch.device(DEVICE):
        model = build(case, case["load"] or case["storage"])
    books.ignore([*(p for p in model.parameters() if p.is_floating_point()), *model.buffers()])
    torch.distributed.fsdp._init_utils._move_module_to_device = lambda m, *a: books.move([*m.parameters(), *m.buffers()])
    torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device = lambda p, b, *a: books.move([*p, *b])
    with mode, books.open():
        books.mark("prepare")
        [books.see(p) for p in model.parameters() if not p.is_floating_point()]  # weights that were quantised on the device
        model = (wrap_fsdp1 if case["kind"] == "fsdp1" else wrap_fsdp2)(case, model, mesh)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=not case["offload"])
        for n in ("1", "2", "2"):
            for i in range(case["gas"]):
                with without_sync(case, model, last=i == case["gas"] - 1):
                    books.mark(f"forward_{n}")
                    loss = run_model(case, model)
                    books.mark(f"backward_{n}")
                    loss.backward()
                    del loss
            books.mark(f"step_{n}")
            optimizer.step()
            books.mark("idle")
            optimizer.zero_grad()
        rows = books.report()
    del model, optimizer
    gc.collect()
    return rows


def import_libraries() -> None:
    """Before the fake mode is entered: some make tensors as they are imported. Weights are not initialised."""
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama

    from launchguard.trace.worker import _fix_libraries

    _fix_libraries()
    transformers.modeling_utils.get_torch_context_manager_or_global_device = lambda: torch.device("meta")


def main(cases_file: str, out_file: str) -> None:
    from launchguard.trace.request import seen_first

    with open(cases_file) as f:
        cases = [{**CASE, **c} for c in json.load(f)]
    mode = start()
    import_libraries()
    place = (0, 0)

    def fill(case: dict[str, Any], result: Any) -> None:
        nonlocal place
        if (case["world"], case["rank"]) != place:
            place = (case["world"], case["rank"])
            enter_world(*place)
        result.trace = trace_of(case, mode)
        seen = seen_first(fsdp_sides.job_of(case))
        if seen is not None:
            result.trace = dataclasses.replace(result.trace, first=trace_of(case, mode, first=seen))
        result.phases = run_framework(case, mode)

    write_results(cases, fill, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a Python PrivateUse1 backend aborts at interpreter exit
