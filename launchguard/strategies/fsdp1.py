"""torch FSDP1 (`FullyShardedDataParallel`): one flat parameter per unit.

Read in torch 2.13 torch/distributed/fsdp/ (_flat_param.py, _runtime_utils.py, _exec_order_utils.py) and accelerate 1.15
accelerator.py:prepare_model; checked against the real code in tests/conformance.
"""

from __future__ import annotations

from collections.abc import Sequence

from launchguard.events import Category, Op, RankSchedule, StepTrace, TraceOp
from launchguard.fsdp_units import Unit, peft_policy, units_of
from launchguard.installed import release
from launchguard.job import FsdpSpec, JobSpec, SavingSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import Engine, broadcast_coalesced, schedule_of
from launchguard.strategies.optimizer_step import OptimizerStates, SteppedTensor, clip_grad_norm
from launchguard.units import ceil_div, dtype_bytes, round_up

PRE_UNSHARD_STREAM, UNSHARD_STREAM, POST_BACKWARD_STREAM = 3, 1, 2  # _runtime_utils.py:_init_streams
ALIGNMENT_BYTES = 16  # use_orig_params: every parameter starts at a multiple (_flat_param.py:_get_aligned_numel)
KEPT_BY_HOOK = ("copy", "gradient")
SHARDED_GRADIENT = (Category.GRADIENTS, "sharded gradients", POST_BACKWARD_STREAM)
CHECKPOINT_INSIDE_UNIT = (4, 52)  # transformers modeling_layers.py:GradientCheckpointingLayer; older ones checkpoint from outside
KEEPS_UNSHARDED = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "NO_SHARD")


class Handle:
    """One FlatParamHandle: its size, and what it holds now. Frozen and trainable parameters of a unit share the flat parameter, and all of
    them get gradients, as they are views of it (_flat_param.py:_use_unsharded_views); trace/build_model.py:share_flat_parameters."""

    def __init__(self, unit: Unit, engine: Fsdp1Engine) -> None:
        self.unit = unit
        params = engine.trace.params
        self.trainable = [i for i in unit.params if params[i].requires_grad]
        self.differentiated = set(unit.params) & engine.differentiated
        self.compute = params[unit.params[0]].dtype
        self.stored = engine.stored_dtype(unit.params[0]) if not self.trainable else engine.stored_dtype(self.trainable[0])
        self.offsets, numel = engine.layout(unit.params, self.compute)
        self.numel = numel
        self.shard = numel if engine.replicated else ceil_div(numel, engine.shards)
        self.full = numel if engine.replicated else self.shard * engine.shards
        self.mixed = self.compute != self.stored
        self.keep = unit.is_root or engine.spec.sharding_strategy in KEEPS_UNSHARDED
        self.flat_param = self.viewed = self.unsharded = 0  # handles; viewed: what the original parameters still look into
        self.grads: dict[int, int] = {}
        self.flat_grad = self.sharded_grad = 0
        self.split_early = False  # prefetched in forward, before the unit in front of it ran
        self.awaits_backward = False  # ran forward with an output that needs a gradient (_needs_pre_backward_unshard)


class Fsdp1Engine(Engine):
    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        super().__init__(job, trace, rank, device)
        self.spec = job.fsdp or FsdpSpec(version=1)
        self.replicated = self.spec.sharding_strategy == "NO_SHARD" or job.world_size == 1  # FSDP1 turns a world of one into NO_SHARD
        self.shards = self.spec.shard_group_size or job.world_size
        self.packed = job.quantization is not None and job.quantization.four_bit
        self.loaded: dict[int, int] = {}  # whole on the device before it is wrapped
        self.differentiated = {e.a for e in trace.events if e.op is TraceOp.GRAD}
        self.differentiable = {e.a for e in trace.events if e.op is TraceOp.BACKWARD_ENTER}
        self.handed_over: Handle | None = None  # a frozen unit that is resharded behind the pre-backward of the unit before it
        self.handles = [Handle(u, self) for u in units_of(trace, self.spec, peft=peft_policy(job))]
        self.of_module = {m: h for h in self.handles for m in h.unit.modules}
        self.of_param = {i: h for h in self.handles for i in h.unit.params}
        self.hand_over = self._hand_over()
        self.order: list[Handle] = []  # post-forward order of this micro-batch
        self.forward_order: list[Handle] = []  # pre-forward order, recorded in the first micro-batch
        self.first = True
        self.sync = True
        self.initialised = False
        self.root_entered = False  # backward has reached the root's outputs
        self.delayed: Handle | None = None  # its split's backward waits for the unit before it
        self.input_bytes = self._recomputed_inputs()
        self.pinned: list[int] = []  # inputs of recomputed frozen units, and their gradients
        self.stale: list[int] = []  # use_orig_params: gradient shards live until the next root pre-forward

    def _hand_over(self) -> set[int]:
        """Frozen units whose input is another unit's output: that unit's pre-backward hook was registered on the tensor first
        (_runtime_utils.py:_register_pre_backward_hooks, _register_post_backward_reshard_only_hook)."""
        found: set[int] = set()
        waiting: set[int] = set()
        for e in self.trace.events:
            if e.op is TraceOp.BACKWARD_EXIT and e.a in self.of_module:
                waiting.add(e.a)
            elif e.op is TraceOp.BACKWARD_ENTER and e.a in self.of_module:
                found |= waiting
                waiting = set()
            elif e.op in (TraceOp.ALLOC, TraceOp.GRAD):
                waiting = set()
        return found

    def _recomputed_inputs(self) -> dict[int, int]:
        """Bytes of the input of each frozen unit that a reentrant checkpoint recomputes from outside. Its reshard-only hook sits on the
        detached copy of that input and holds it, and so its gradient, until the hook is removed at the end of backward
        (_runtime_utils.py:_register_post_backward_reshard_only_hook; torch/autograd/graph.py:register_multi_grad_hook). Seen with
        transformers 4.48.1, and not with 5.24, on a virtual card."""
        ckpt, version = self.job.activation_checkpointing, self.job.versions.get("transformers")
        if not (ckpt.enabled and ckpt.via == "model" and ckpt.use_reentrant and version) or release(version) >= CHECKPOINT_INSIDE_UNIT:
            return {}
        sizes = {e.a: e.b for e in self.trace.events if e.op is TraceOp.ALLOC}
        checkpointed = self.trace.facts.get("no_split_modules", ())
        frozen = {m for h in self.handles if not h.trainable and not h.unit.is_root for m in h.unit.modules}
        layers = {m for m in frozen if self.trace.modules[m].cls in checkpointed}
        return {e.a: sizes.get(e.b, 0) for e in self.trace.events if e.op is TraceOp.ENTER and e.a in layers}

    def layout(self, params: Sequence[int], compute: str) -> tuple[list[int], int]:
        """Where each parameter starts in the flat one, and its numel. use_orig_params: parameters start at 16 bytes, and the end is padded
        to a multiple of the ranks (_flat_param.py:_init_flat_param_and_metadata)."""
        aligned = ALIGNMENT_BYTES // dtype_bytes(compute) if self.spec.use_orig_params else 1
        offsets, total = [], 0
        for i in params:
            offsets.append(round_up(total, aligned))
            total = offsets[-1] + self.trace.params[i].numel
        return offsets, round_up(total, self.shards) if self.spec.use_orig_params else total

    # wrap --------------------------------------------------------------------------------------------------------------
    def load(self) -> None:
        """Under FSDP the model is loaded on the CPU and moved unit by unit; one in 4 bits is on the device from the start, as bitsandbytes
        quantises there."""
        if self.packed:
            self.alloc_buffers()
            for h in self.handles:
                for i in h.unit.params:
                    nbytes = self.stored_bytes(i, self._loaded_dtype(h))
                    self.loaded[i] = self.stream.alloc(nbytes, Category.PARAMETERS, "unit before sharding")

    def _loaded_dtype(self, h: Handle) -> str:
        """Of the parameters of a unit before Accelerate upcasts them: a unit of adapters alone has the float32 that PEFT made them in."""
        lora, params = self.job.lora, self.trace.params
        adapters = lora is not None and lora.autocast_adapter_dtype and all(params[i].requires_grad for i in h.unit.params)
        return "float32" if adapters else self.job.precision.load

    def prepare(self) -> None:
        """Wrap bottom-up (_init_utils.py:_init_param_handle_from_module): move, broadcast, flatten, shard; then Accelerate upcasts the
        trainable flat parameters, the root's first (accelerate 1.15 accelerator.py:prepare_model)."""
        root = self.handles[-1]
        for h in self.handles:
            if h is root and not self.packed:
                self.alloc_buffers()
            h.flat_param = self._wrap(h, self._loaded_dtype(h))
            if self.spec.offload_params:
                self.stream.free(h.flat_param)
        for h in [root, *self.handles[:-1]]:
            if self._loaded_dtype(h) != h.stored and not self.spec.offload_params:
                upcast = self.stream.alloc(h.shard * dtype_bytes(h.stored), Category.PARAMETERS, "sharded parameters")
                if self.spec.use_orig_params:  # the original parameters look into the old one until the unit is resharded
                    h.viewed = h.flat_param
                else:
                    self.stream.free(h.flat_param)
                h.flat_param = upcast
        self.optimizer = OptimizerStates(self.stream, self.job.optimizer, [self._stepped()], on_device=not self.spec.offload_params)

    def _wrap(self, h: Handle, load: str) -> int:
        """One unit on the device, flattened and sharded; what is left of it. Buffers are broadcast with the root's parameters."""
        sizes = [self.stored_bytes(i, load) for i in h.unit.params]
        own = [self.loaded[i] for i in h.unit.params if i in self.loaded]
        own = own or [self.stream.alloc(n, Category.PARAMETERS, "unit before sharding") for n in sizes]
        if self.spec.sync_module_states:
            buffers = self.trace.buffer_bytes if h is self.handles[-1] and load == "float32" else ()
            broadcast_coalesced(self.stream, [*buffers, *sizes])
        flat = self.stream.alloc(h.numel * dtype_bytes(load), Category.PARAMETERS, "flattened unit")
        if not self.replicated:
            shard = self.stream.alloc(h.shard * dtype_bytes(load), Category.PARAMETERS, "sharded parameters")
            self.stream.free(flat)
            flat = shard
        self.stream.free(*own)
        return flat

    def _stepped(self) -> list[SteppedTensor]:
        """use_orig_params: the optimizer sees the part of each parameter that lies in this rank's shard; else the flat shard."""
        stepped: list[SteppedTensor] = []
        for h in self.handles:
            if not h.trainable:
                continue
            if not self.spec.use_orig_params:
                stepped.append(SteppedTensor((h.shard,), h.stored))
                continue
            low = 0 if self.replicated else (self.rank % self.shards) * h.shard
            for i, offset in zip(h.unit.params, h.offsets):
                mine = min(offset + self.trace.params[i].numel, low + h.shard) - max(offset, low)
                if mine > 0 and self.trace.params[i].requires_grad:
                    stepped.append(SteppedTensor((mine,), h.stored))
        return stepped

    def _lazy_init(self) -> None:
        """Every handle's working tensors are made once and their storages freed (_flat_param.py:init_flat_param_attributes)."""
        self.initialised = True
        for h in [self.handles[-1], *self.handles[:-1]]:
            sizes = [h.shard * dtype_bytes(h.compute)] if h.mixed else []
            if not self.replicated:
                sizes += [h.full * dtype_bytes(h.compute)] + ([h.full * dtype_bytes(h.stored)] if h.mixed else [])
            for nbytes in sizes:
                self.stream.touch(nbytes, Category.PARAMETERS, "flat parameter attributes")

    # gathering ---------------------------------------------------------------------------------------------------------
    def _unshard(self, h: Handle) -> None:
        if h.unsharded or (self.replicated and not h.mixed and not self.spec.offload_params):
            return
        staged = 0
        if self.spec.offload_params:
            staged = self.stream.alloc(
                h.shard * dtype_bytes(h.stored), Category.COMMUNICATION, "shard copied to the device", PRE_UNSHARD_STREAM
            )
        cast = 0
        if h.mixed:
            cast = self.stream.alloc(h.shard * dtype_bytes(h.compute), Category.COMMUNICATION, "low-precision shard", PRE_UNSHARD_STREAM)
        if self.replicated:
            h.unsharded = cast  # NO_SHARD computes with the low-precision copy itself
            self.stream.free(staged)
            return
        h.unsharded = self.stream.alloc(h.full * dtype_bytes(h.compute), Category.PARAMETERS, "unsharded parameters", UNSHARD_STREAM)
        self.stream.free(cast, staged)

    def _reshard(self, h: Handle, free: bool = True) -> None:
        """FlatParamHandle.reshard and post_reshard; NO_SHARD's low-precision copy always goes."""
        if free or self.replicated:
            self.stream.free(h.unsharded)
            h.unsharded = 0
        self.stream.free(h.viewed)
        h.viewed = 0

    # marks -------------------------------------------------------------------------------------------------------------
    def begin_micro_batch(self, last: bool) -> None:
        self.sync = last or self.spec.sync_each_batch
        self.order = []

    def _root_pre_forward(self) -> None:
        self.stream.free(*self.stale)
        self.stale = []
        if not self.initialised:
            self._lazy_init()

    def enter(self, module: int, recompute: bool) -> None:
        if module == 0 and not recompute:
            self._root_pre_forward()
        h = self.of_module.get(module)
        if h is None:
            return
        if self.first and not recompute:
            self.forward_order.append(h)
        self._unshard(h)
        later = self.forward_order.index(h) + 1
        if self.spec.forward_prefetch and not recompute and later < len(self.forward_order):
            self._unshard(self.forward_order[later])
            self.forward_order[later].split_early = True

    def exit(self, module: int, recompute: bool) -> None:
        """_post_forward_reshard; strategies that keep the unit also keep the views into it (skip_use_sharded_views)."""
        h = self.of_module.get(module)
        if h is None or recompute:
            return
        self.order.append(h)
        h.awaits_backward = module in self.differentiable
        if not h.keep or h.unit.is_root and self.spec.sharding_strategy not in KEEPS_UNSHARDED or self.replicated:
            self._reshard(h, free=not h.keep)

    def backward_begin(self) -> None:
        self.root_entered = self.first = False

    def backward_enter(self, module: int) -> None:
        """Hooks on a unit's outputs; the root's run before all others, once the loss has been differentiated as far as its outputs."""
        root = self.of_module.get(0)
        if not self.root_entered:
            self.root_entered = True
            if root is not None:
                self._pre_backward(root)
        h = self.of_module.get(module)
        if h is not None and not h.unit.is_root:
            self._pre_backward(h)
            self._reshard_handed_over()

    def _reshard_handed_over(self) -> None:
        if self.handed_over is not None:
            self._reshard(self.handed_over)
            self.handed_over = None

    def _pre_backward(self, h: Handle) -> None:
        self._unshard(h)
        h.awaits_backward = False
        if self.spec.backward_prefetch == "BACKWARD_PRE":
            self._prefetch_before(h)

    def _prefetch_before(self, h: Handle) -> None:
        """get_handle_to_backward_prefetch: the unit before this one in the post-forward order, unless its own backward has begun."""
        if h in self.order and self.order.index(h) > 0:
            target = self.order[self.order.index(h) - 1]
            if target.awaits_backward:
                self._unshard(target)

    def grad(self, param: int, handle: int) -> None:
        h = self.of_param[param]
        if param in h.grads:
            self.stream.free(handle)
        else:
            h.grads[param] = handle
            if len(self.trace.params[param].owners) > 1:
                self._sum_on_unshard_stream(handle)

    def backward_exit(self, module: int) -> None:
        """The unit's flat parameter was split before its forward ran, so autograd runs the split's backward after all nodes of the unit; if
        it was prefetched, after those of the unit before it, too. A frozen unit is resharded when its inputs' gradients are ready."""
        h = self.of_module.get(module)
        if h is None or h.unit.is_root:
            return
        if not h.trainable:
            if module in self.input_bytes:
                size = self.input_bytes[module]
                self.pinned += [self.stream.alloc(size, Category.ACTIVATIONS, f"{kept} of a frozen unit's input") for kept in KEPT_BY_HOOK]
            self.handed_over = h
            if module not in self.hand_over:
                self._reshard_handed_over()
        elif h.grads.keys() == h.differentiated:
            for ready in [k for k in (self.delayed, None if h.split_early else h) if k is not None]:
                self._post_backward(ready)
            self.delayed = h if h.split_early else None

    def backward_end(self) -> None:
        self.delayed = None
        self.stream.free(*self.pinned)
        self.pinned = []
        for h in self.handles:
            if h.grads:
                self._post_backward(h)
            elif not h.trainable:
                self._reshard(h)
            if self.sync and self.spec.offload_params:  # prepare_gradient_for_optim drops _saved_grad_shard: .grad is the host's copy
                self.stream.free(h.sharded_grad)
                h.sharded_grad = 0

    def _sum_on_unshard_stream(self, handle: int) -> None:
        """Gradients of a tied parameter meet in the view that was split off on the unshard stream; where autograd cannot add in place, it
        makes their sum on that node's stream (torch 2.13 autograd/input_buffer.cpp:InputBuffer::add)."""
        events = self.stream.events
        at = len(events) - 1
        while events[at].op is Op.FREE:
            at -= 1
        if events[at].op is Op.ALLOC and events[at].handle == handle:
            events[at] = events[at]._replace(stream=UNSHARD_STREAM)

    def _post_backward(self, h: Handle) -> None:
        """The split backward concatenates the parameters' gradients into one flat gradient, then _post_backward_hook reduces it.
        Autograd runs it on the stream that split the flat parameter in forward (_runtime_utils.py:_unshard)."""
        flat = self.stream.alloc(h.numel * dtype_bytes(h.compute), Category.GRADIENTS, "flat gradient", UNSHARD_STREAM)
        self.stream.free(*h.grads.values())
        h.grads, h.split_early = {}, False
        added = 0
        if h.flat_grad:  # no_sync left one: the new gradient is added to it, and the hook's arguments hold it
            added, flat, h.flat_grad = flat, h.flat_grad, 0
        self._reshard(h, free=self.sync or not h.keep or h.unit.is_root and self.spec.sharding_strategy not in KEEPS_UNSHARDED)
        if self.spec.backward_prefetch == "BACKWARD_POST":
            self._prefetch_before(h)
        if self.sync:
            self._reduce(h, flat)
        else:
            h.flat_grad = flat
        self.stream.free(added)

    def _reduce(self, h: Handle, flat: int) -> None:
        reduce_dtype = self.job.precision.reduce if self.mixed else h.compute
        cast = padded = 0
        if reduce_dtype != h.compute:
            cast = self._temporary(h.numel * dtype_bytes(reduce_dtype), "gradient in the reduce dtype")
        shard, used = cast or flat, flat if cast else 0
        if not self.replicated:
            if h.numel % self.shards:
                padded = self._temporary(h.full * dtype_bytes(reduce_dtype), "padded gradient")
            shard, used = self.stream.alloc(h.shard * dtype_bytes(reduce_dtype), *SHARDED_GRADIENT), flat
        if reduce_dtype != h.stored:
            stored = self.stream.alloc(h.shard * dtype_bytes(h.stored), *SHARDED_GRADIENT)
            if not (self.replicated and shard == flat):
                self.stream.free(shard)
            else:
                used = flat
            shard = stored
        if h.sharded_grad:
            self.stream.free(shard)  # added to the shard that is there
        else:
            h.sharded_grad = shard
        self.stream.free(used, padded, 0 if cast == shard else cast)

    def _temporary(self, nbytes: int, label: str) -> int:
        return self.stream.alloc(nbytes, Category.COMMUNICATION, label, POST_BACKWARD_STREAM)

    # step --------------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        if self.job.max_grad_norm is not None and not self.spec.offload_params:
            # its own, without foreach (_runtime_utils.py: FullyShardedDataParallel.clip_grad_norm_, _get_grad_norm)
            count = len(self.trainable) if self.spec.use_orig_params else len(self.handles)
            clip_grad_norm(self.stream, [0] * count, foreach=False)
        assert self.optimizer is not None
        self.optimizer.step()

    def save(self, spec: SavingSpec) -> None:
        """A full state dict of the model, then optimizer states unit by unit in one buffer (_optim_utils.py:
        _allgather_orig_param_states). Sharded ones are copied to the host as they are."""
        if self.spec.state_dict_type != "FULL_STATE_DICT" or self.replicated:
            return
        self.gather_state_dict("rank 0")
        for h in self.handles if spec.optimizer else ():
            if h.trainable:
                gathered = self.stream.alloc(h.full * dtype_bytes(h.stored), Category.COMMUNICATION, "gathered optimizer state")
                self.stream.touch(h.shard * dtype_bytes(h.stored), Category.COMMUNICATION, "gathered optimizer state")
                self.stream.free(gathered)

    def gather_state_dict(self, where: str) -> None:
        """A full state dict unshards each unit in full precision, which drops its low-precision copy. With offload_to_cpu it goes to the
        host before the next (torch 2.13 _unshard_param_utils.py:_unshard_fsdp_state_params, _flat_param.py:to_cpu); without, each of its
        parameters is cloned, the root being whole all the while (_state_dict_utils.py:_full_pre_state_dict_hook,
        _full_post_state_dict_hook). save_pretrained of a wrapped model leaves the root's own parameters out: an upper bound."""
        if self.replicated or where == "sharded":
            return
        if where == "device":
            self._clone_units()
        else:
            for h in self.handles:
                self.stream.free(self._whole(h))

    def _clone_units(self) -> None:
        clones: list[int] = []
        *units, root = self.handles
        whole = self._whole(root)
        for h in units:
            unsharded = self._whole(h)
            clones += self._clones(h)
            self.stream.free(unsharded)
        self.stream.free(whole, *clones, *self._clones(root))

    def whole_model(self) -> list[int]:
        """summon_full_params: every unit in full precision."""
        return [] if self.replicated else [self._whole(h) for h in self.handles]

    def _whole(self, h: Handle) -> int:
        self._reshard(h)
        return self.stream.alloc(h.full * dtype_bytes(h.stored), Category.COMMUNICATION, "gathered state dict", UNSHARD_STREAM)

    def _clones(self, h: Handle) -> list[int]:
        sizes = (self.trace.params[i].numel * dtype_bytes(h.stored) for i in h.unit.params)
        return [self.stream.alloc(n, Category.COMMUNICATION, "state dict on the device") for n in sizes]

    def synced_tensors(self) -> list[int]:
        """FSDP.summon_full_params of one unit after the other (trl 1.16 generation/vllm_generation.py:_iter_fsdp1_named_params)."""
        return [] if self.replicated else [h.full * dtype_bytes(h.stored) for h in self.handles]

    def resume(self) -> None:
        """A full state dict is copied into units that are whole in full precision, the root all the while (torch 2.13 _state_dict_utils.py:
        _full_pre_load_state_dict_hook); rank 0 sends each unit's optimizer states whole, and a shard is kept (_optim_utils.py:
        _broadcast_processed_state, _shard_orig_param_state). Sharded ones are read into the shards."""
        if self.spec.state_dict_type == "FULL_STATE_DICT" and not self.replicated:
            *units, root = self.handles
            whole = self.stream.alloc(root.full * dtype_bytes(root.stored), Category.COMMUNICATION, "whole unit", UNSHARD_STREAM)
            for h in units:
                self.stream.touch(h.full * dtype_bytes(h.stored), Category.COMMUNICATION, "whole unit", UNSHARD_STREAM)
            self.stream.free(whole)
            for h in self.handles:
                if h.trainable and not self.spec.offload_params:
                    self.stream.touch(h.full * dtype_bytes(h.stored), Category.COMMUNICATION, "broadcast optimizer state")
        super().resume()

    def zero_grad(self) -> None:
        """With use_orig_params zero_grad drops views only; the flat shard goes at the next root pre-forward
        (_flat_param.py:_reset_flat_param_grad_info_if_needed)."""
        held = [h.sharded_grad for h in self.handles if h.sharded_grad]
        for h in self.handles:
            h.sharded_grad = 0
        if self.spec.use_orig_params:
            self.stale += held
        else:
            self.stream.free(*held)


def representatives(job: JobSpec, trace: StepTrace) -> list[tuple[int, ...]]:
    """Flat shards are padded to equal size on every rank."""
    return [tuple(range(job.world_size))]


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    return schedule_of(Fsdp1Engine(job, trace, ranks[0], device), ranks)
