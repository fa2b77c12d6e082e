"""torch FSDP2 (`fully_shard`): shards per parameter, gathers per group, reduces per group.

Read in torch 2.13 torch/distributed/fsdp/_fully_shard/ (_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_param.py) and accelerate 1.15
utils/fsdp_utils.py:fsdp2_prepare_model; equal to the real code byte for byte in tests/conformance.
"""

from __future__ import annotations

import dataclasses

from launchguard.events import Category, RankSchedule, StepTrace
from launchguard.fsdp_units import Unit, peft_policy, units_of
from launchguard.job import FsdpSpec, JobSpec, SavingSpec
from launchguard.profiles import DeviceProfile
from launchguard.strategies._loop import Engine, init_optim_state, schedule_of
from launchguard.strategies.optimizer_step import OptimizerStates, SteppedTensor, clip_grad_norm, parameter_groups
from launchguard.units import ceil_div, dtype_bytes

COMPUTE_STREAM, ALL_GATHER_STREAM, REDUCE_SCATTER_STREAM = 0, 1, 2


class Group:
    """One FSDPParamGroup: sizes in elements and bytes, and what it holds now."""

    def __init__(self, unit: Unit, engine: Fsdp2Engine) -> None:
        self.unit = unit
        params = engine.trace.params
        self.padded = {
            i: ceil_div(params[i].shape[0], engine.shards) * (params[i].numel // max(params[i].shape[0], 1)) for i in unit.params
        }
        self.compute_bytes = {i: self.padded[i] * dtype_bytes(params[i].dtype) for i in unit.params}
        self.stored_bytes = {i: self.padded[i] * dtype_bytes(engine.stored_dtype(i)) for i in unit.params}
        self.trainable = [i for i in unit.params if params[i].requires_grad]
        self.casts = sum(self.compute_bytes[i] for i in unit.params if params[i].dtype != engine.stored_dtype(i))
        self.shard_bytes = sum(self.compute_bytes.values())
        self.resharded = engine.reshard and not unit.keep
        self.unsharded: list[int] = []  # handles of the full parameters
        self.part: list[int] = []  # handles of the shards that reshard_after_forward = k keeps
        self.gathered = 0  # handle of the flat all-gather output, until it is copied out
        self.is_gathered = False
        self.grads: dict[int, int] = {}  # unsharded gradients as autograd makes them
        self.accumulated: dict[int, int] = {}  # no_sync: unsharded gradients in the reduce dtype, where that differs
        self.sharded_grad = 0
        self.has_sharded_grad = False
        self.reduced = False
        self.forward_done = False
        self.first_entered = -1  # the module of the group whose inputs carry the post-backward hook


class Fsdp2Engine(Engine):
    def __init__(self, job: JobSpec, trace: StepTrace, rank: int, device: DeviceProfile) -> None:
        super().__init__(job, trace, rank, device)
        self.spec = job.fsdp or FsdpSpec(version=2)
        self.shards = self.spec.shard_group_size or job.world_size
        k = self.spec.reshard_after_forward
        self.reshard = bool(k) and (k is True or k != 1)  # _fsdp_init.py:_get_post_forward_mesh_info
        self.parts = k if self.reshard and k is not True and k != self.shards else 0
        self.packed = job.quantization is not None and job.quantization.four_bit
        self.ram_efficient = self.spec.cpu_ram_efficient_loading and not self.packed  # fsdp2_prepare_model: model_has_params4bit
        self.loaded: dict[int, int] = {}  # whole on the device before fully_shard
        self.replicated = frozenset(self._replicated())
        units = [self._sharded(u) for u in units_of(trace, self.spec, grouping=self.spec.accelerate_grouping, peft=peft_policy(job))]
        self.groups = [Group(u, self) for u in units]
        self.of_module: dict[int, Group] = {m: g for g in self.groups for m in g.unit.modules}
        self.of_param: dict[int, Group] = {i: g for g in self.groups for i in g.unit.params}
        self.order: list[Group] = []  # post-forward order of this micro-batch
        self.previous_gather = 0  # all-gather output kept until the next group's copy-out
        self.reduce_input = 0
        self.sync = True
        self.root_entered = False  # backward has reached the root's outputs

    # load and wrap -----------------------------------------------------------------------------------------------------
    def load(self) -> None:
        """Under FSDP the model is loaded on the CPU (or meta) and moved unit by unit; one in 4 bits is on the device from the start, as
        bitsandbytes quantises there."""
        for i in sorted(self.replicated):
            self.stream.alloc(self.stored_bytes(i), Category.PARAMETERS, "parameters (not sharded)")
        if self.packed:
            self.alloc_buffers()
            for i in [i for g in self.groups for i in g.unit.params]:
                self.loaded[i] = self.stream.alloc(self.stored_bytes(i, self.stored_dtype(i)), Category.PARAMETERS, "unit before sharding")

    def _replicated(self) -> list[int]:
        """4-bit weights in an integer storage dtype are kept out of fully_shard (accelerate 1.15 fsdp_utils.py:fsdp2_prepare_model)."""
        return [i for i, p in enumerate(self.trace.params) if self.packed and p.dtype == "uint8"]

    def _sharded(self, unit: Unit) -> Unit:
        return dataclasses.replace(unit, params=tuple(i for i in unit.params if i not in self.replicated))

    def prepare(self) -> None:
        """fully_shard moves a unit to the device, shards it and, under offload, copies the shards back
        (_fsdp_param.py:_init_sharded_param)."""
        held: list[int] = []
        for g in self.groups:
            if g.unit.is_root and not self.packed:
                self.alloc_buffers()
            held += self._wrap(g)
        if not self.groups[-1].unit.is_root and not self.packed:
            self.alloc_buffers()
        self.stream.free(*held)
        if self.ram_efficient:
            self._load_full_state_dict()
        self.optimizer = OptimizerStates(self.stream, self.job.optimizer, self._parameter_groups(), on_device=not self.spec.offload_params)

    def _wrap(self, g: Group) -> list[int]:
        """Shard one group; returns the full parameters that outlive it: fsdp2_prepare_model's locals hold the weights of embedding and
        head (input_weight, output_weight), the last parameter (param, the variable of its loops), and what was on the device before
        (original_sd)."""
        full: dict[int, int] = {i: self.loaded[i] for i in g.unit.params if i in self.loaded}
        if not (self.ram_efficient or full):
            for i in g.unit.params:
                full[i] = self.stream.alloc(self.stored_bytes(i, self.stored_dtype(i)), Category.PARAMETERS, "unit before sharding")
        for i in g.unit.params:
            if not (self.spec.offload_params and self.ram_efficient):
                shard = self.stream.alloc(g.stored_bytes[i], Category.PARAMETERS, "sharded parameters")
                self.stream.free(shard if self.spec.offload_params else 0)
        outlive = self._in_locals() | self.loaded.keys() if self.spec.accelerate_grouping else frozenset()
        self.stream.free(*[h for i, h in full.items() if i not in outlive])
        return [h for i, h in full.items() if i in outlive]

    def _in_locals(self) -> frozenset[int]:
        names = {self.trace.facts.get("input_embedding"), self.trace.facts.get("output_embedding")} - {None}
        last = len(self.trace.params) - 1
        return frozenset(i for i, p in enumerate(self.trace.params) if i == last or p.name in {f"{n}.weight" for n in names})

    def _load_full_state_dict(self) -> None:
        """accelerate fsdp2_load_full_state_dict: every full parameter is broadcast to the device, its shard is kept."""
        for i in range(len(self.trace.params)):
            self.stream.touch(self.stored_bytes(i, self.stored_dtype(i)), Category.PARAMETERS, "parameter broadcast")

    def _parameter_groups(self) -> list[list[SteppedTensor]]:
        return parameter_groups([SteppedTensor(self._local_shape(i), self.stored_dtype(i)) for i in self.trainable], self.job.loop)

    def _local_shape(self, i: int) -> tuple[int, ...]:
        """The unpadded local shard, which optimizer states follow."""
        shape = self.trace.params[i].shape
        rows = ceil_div(shape[0], self.shards)
        return (min(rows, max(0, shape[0] - (self.rank % self.shards) * rows)), *shape[1:])

    # gathering ---------------------------------------------------------------------------------------------------------
    def _unshard(self, g: Group) -> None:
        """FSDPParamGroup.unshard: issue the all-gather; a no-op when it is under way or done."""
        if g.is_gathered or g.unsharded or not g.unit.params:
            return
        g.is_gathered = True
        if self.shards == 1:
            return
        if self.spec.offload_params:
            inputs = [self._copy_shard(g, i) for i in g.unit.params]
        else:
            copied = g.casts * self.shards // self.parts if g.part else g.casts  # kept parts are copied, too, if there is a param_dtype
            inputs = [self.stream.alloc(copied, Category.COMMUNICATION, "cast shard", ALL_GATHER_STREAM)]
        g.gathered = self.stream.alloc(g.shard_bytes * self.shards, Category.COMMUNICATION, "all-gather output", ALL_GATHER_STREAM)
        self.stream.free(*inputs)

    def _copy_shard(self, g: Group, i: int) -> int:
        """CPU offload: one parameter's shard on the device, then cast (_fsdp_param.py:all_gather_inputs)."""
        copied = self.stream.alloc(g.stored_bytes[i], Category.COMMUNICATION, "shard copied to the device", ALL_GATHER_STREAM)
        if self.trace.params[i].dtype == self.stored_dtype(i):
            return copied
        cast = self.stream.alloc(g.compute_bytes[i], Category.COMMUNICATION, "cast shard", ALL_GATHER_STREAM)
        self.stream.free(copied)
        return cast

    def _wait(self, g: Group, forward: bool) -> None:
        """wait_for_unshard: copy out. In forward the flat output lives until the next group's call returns, whose locals hold it."""
        if not g.is_gathered:
            return
        g.is_gathered = False
        for i, nbytes in g.compute_bytes.items():
            cast = 0
            if self.shards == 1 and self.trace.params[i].dtype != self.stored_dtype(i):
                cast = self.stream.alloc(nbytes, Category.COMMUNICATION, "cast shard")
            g.unsharded.append(self.stream.alloc(nbytes * self.shards, Category.PARAMETERS, "unsharded parameters"))
            self.stream.free(cast)
        self.stream.free(*g.part)
        g.part = []
        if forward:
            self.stream.free(self.previous_gather)
            self.previous_gather = g.gathered
        else:
            self.stream.free(g.gathered)
        g.gathered = 0

    def _reshard(self, g: Group, after_forward: bool = False) -> None:
        """reshard_after_forward = k: a shard of k parts stays until backward has gathered it again
        (_fsdp_param.py:to_sharded_post_forward)."""
        for handle, nbytes in zip(g.unsharded, g.compute_bytes.values()):
            if after_forward and self.parts:
                g.part.append(self.stream.alloc(nbytes * self.shards // self.parts, Category.PARAMETERS, "shards kept after forward"))
            self.stream.free(handle)
        g.unsharded = []

    # marks -------------------------------------------------------------------------------------------------------------
    def begin_micro_batch(self, last: bool) -> None:
        self.sync = last or self.spec.sync_each_batch
        self.order = []
        for g in self.groups:
            g.forward_done = g.reduced = False
            g.first_entered = -1

    def enter(self, module: int, recompute: bool) -> None:
        g = self.of_module.get(module)
        if g is not None and not recompute:
            g.first_entered = module if g.first_entered < 0 else g.first_entered
            self._unshard(g)
            self._wait(g, forward=True)

    def exit(self, module: int, recompute: bool) -> None:
        if module == 0 and not recompute:
            self._root_post_forward()
        g = self.of_module.get(module)
        if g is None or recompute or g.unit.is_root or module != self._last_module(g):
            return
        if g.resharded:
            self._reshard(g, after_forward=True)
        g.forward_done = True
        self.order.append(g)

    def _last_module(self, g: Group) -> int:
        """A group of several modules (final norm and head) is done when the one that runs last is."""
        return g.unit.modules[-1]

    def _root_post_forward(self) -> None:
        """_fsdp_state.py:_post_forward: the last all-gather output goes."""
        self.stream.free(self.previous_gather)
        self.previous_gather = 0
        root = self.of_module.get(0)
        if root is not None:
            self.order.append(root)

    def backward_begin(self) -> None:
        self.root_entered = False

    def backward_enter(self, module: int) -> None:
        """Hooks on a module's outputs; the root's run before all others, once the loss has been differentiated as far as its outputs."""
        root = self.of_module.get(0)
        if not self.root_entered:
            self.root_entered = True
            if root is not None:
                self._pre_backward(root)
        g = self.of_module.get(module)
        if g is not None and not g.unit.is_root and g.forward_done:
            g.forward_done = False  # once per micro-batch
            self._pre_backward(g)

    def _pre_backward(self, g: Group) -> None:
        self._unshard(g)
        self._wait(g, forward=False)
        if g in self.order:
            position = self.order.index(g)
            if position > 0:
                self._unshard(self.order[position - 1])  # default prefetch, one group deep

    def backward_exit(self, module: int) -> None:
        g = self.of_module.get(module)
        if g is not None and not g.unit.is_root and module == g.first_entered:
            self._post_backward(g)

    def grad(self, param: int, handle: int) -> None:
        g = self.of_param[param]
        if param in g.grads:
            self.stream.free(handle)  # accumulated in place
        else:
            g.grads[param] = handle

    def backward_end(self) -> None:
        """Root post-backward: groups whose inputs need no gradient (the embedding), and the root, are reduced here."""
        for g in reversed(self.groups):
            self._post_backward(g)
        self.stream.free(self.reduce_input)
        self.reduce_input = 0

    def _post_backward(self, g: Group) -> None:
        """FSDPParamGroup.post_backward."""
        if g.reduced:
            return
        g.reduced = True
        if g.is_gathered:  # prefetched but never used
            self.stream.free(g.gathered)
            g.gathered, g.is_gathered = 0, False
        self._reshard(g)
        if g.accumulated or g.grads and not self.sync:
            self._accumulate_unsharded(g)
        if not self.sync or not (g.grads or g.accumulated):
            return
        self._reduce(g, g.accumulated or g.grads)

    def _reduce(self, g: Group, grads: dict[int, int]) -> None:
        """foreach_reduce of one group's unsharded gradients; its loop variable holds the last of them until it returns."""
        self.stream.free(self.reduce_input)
        elements = sum(g.padded[i] for i in grads)
        reduce_dtype = self._reduce_dtype(g)
        reduce_bytes, stored = elements * dtype_bytes(reduce_dtype), self.stored_dtype(g.trainable[0])
        self.reduce_input = self.stream.alloc(reduce_bytes * self.shards, Category.COMMUNICATION, "reduce-scatter input")
        last = grads.pop(max(grads)) if self.shards > 1 else 0
        self.stream.free(*grads.values())
        grads.clear()
        output = self.stream.alloc(reduce_bytes, Category.GRADIENTS, "sharded gradients", REDUCE_SCATTER_STREAM)
        if reduce_dtype != stored:
            cast = self.stream.alloc(elements * dtype_bytes(stored), Category.GRADIENTS, "sharded gradients", REDUCE_SCATTER_STREAM)
            self.stream.free(output)
            output = cast
        if self.spec.offload_params or g.has_sharded_grad:
            self.stream.free(output)  # copied to the host, or added to the shard that is there
        else:
            g.sharded_grad = output
        g.has_sharded_grad = True
        self.stream.free(last)

    def _reduce_dtype(self, g: Group) -> str:
        compute = self.trace.params[g.trainable[0]].dtype
        return self.job.precision.reduce if self.mixed else compute

    def _accumulate_unsharded(self, g: Group) -> None:
        """no_sync: full gradients stay, in the reduce dtype where that differs (_fsdp_param.py:to_accumulated_grad_if_needed,
        accumulate_unsharded_grad_if_needed)."""
        reduce_dtype = self._reduce_dtype(g)
        for i, handle in list(g.grads.items()):
            p = self.trace.params[i]
            if p.dtype == reduce_dtype:
                continue
            if i not in g.accumulated:
                nbytes = p.numel * dtype_bytes(reduce_dtype)
                g.accumulated[i] = self.stream.alloc(nbytes, Category.GRADIENTS, "unsharded gradients (no_sync)")
            self.stream.free(handle)
            del g.grads[i]

    # step --------------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        if self.job.max_grad_norm is not None and not self.spec.offload_params:
            clip_grad_norm(self.stream, [n for g in self.groups for i, n in g.padded.items() if i in g.trainable])
        assert self.optimizer is not None
        self.optimizer.step()

    def save(self, spec: SavingSpec) -> None:
        """The state_dict hook reshards every group; a full state dict then makes each tensor whole in turn, parameters first, then both
        moments of the trained ones, and moves it to rank 0's host (torch 2.13 _fully_shard/_fsdp_state.py, _fsdp_param_group.py:
        _register_state_dict_hooks; distributed/_state_dict_utils.py:_gather_state_dict). Sharded ones are copied to the host as they are.
        The Trainer gathers the model twice, for its own file and for resuming (transformers 5.24 trainer.py:save_model)."""
        for g in self.groups:
            self._reshard(g)
        if self.spec.state_dict_type != "FULL_STATE_DICT" or self.shards == 1:
            return
        states = self.trainable * 2 if spec.optimizer else []
        for i in (*range(len(self.trace.params)), *states):
            self.stream.touch(self.stored_bytes(i, self.stored_dtype(i)), Category.COMMUNICATION, "gathered state dict")

    def gather_state_dict(self, where: str) -> None:
        """Each tensor is made whole in turn, and stays where it was made unless it goes to the host (torch 2.13 distributed/
        _state_dict_utils.py:_gather_state_dict with cpu_offload or without; tensor/_api.py:full_tensor)."""
        sizes = self.synced_tensors()
        if where == "device":
            self.stream.free(*[self.stream.alloc(n, Category.COMMUNICATION, "state dict on the device") for n in sizes])
        elif where != "sharded":
            for n in sizes:
                self.stream.touch(n, Category.COMMUNICATION, "gathered state dict")

    def synced_tensors(self) -> list[int]:
        """full_tensor of one parameter after the other (trl 1.16 generation/vllm_generation.py)."""
        return [self.stored_bytes(i, self.stored_dtype(i)) for i in range(len(self.trace.params))] if self.shards > 1 else []

    def resume(self) -> None:
        """Optimizer states are made by a step first, then filled (accelerate 1.15 utils/fsdp_utils.py:load_fsdp_optimizer). A full state
        dict is sent from rank 0 tensor by tensor, model and moments alike (torch 2.13 distributed/_state_dict_utils.py:
        _broadcast_state_dict); sharded ones are read into the shards."""
        full = self.spec.state_dict_type == "FULL_STATE_DICT" and self.shards > 1
        for i in range(len(self.trace.params)) if full else ():
            self.stream.touch(self.stored_bytes(i, self.stored_dtype(i)), Category.COMMUNICATION, "broadcast state dict")
        init_optim_state(self)
        for i in self.trainable * 2 if full else ():
            self.stream.touch(self.stored_bytes(i, self.stored_dtype(i)), Category.COMMUNICATION, "broadcast state dict")

    def zero_grad(self) -> None:
        for g in self.groups:
            self.stream.free(g.sharded_grad)
            g.sharded_grad, g.has_sharded_grad = 0, False


def representatives(job: JobSpec, trace: StepTrace) -> list[tuple[int, ...]]:
    """Shards are padded to equal size; optimizer states are not, so the last ranks may hold less. Rank 0 stands for all but the last."""
    shards = (job.fsdp.shard_group_size if job.fsdp else None) or job.world_size
    uneven = any(p.requires_grad and p.shape and p.shape[0] % shards for p in trace.params)
    ranks = tuple(range(job.world_size))
    return [ranks[:-1], ranks[-1:]] if uneven and job.world_size > 1 else [ranks]


def schedule(job: JobSpec, trace: StepTrace, ranks: tuple[int, ...], device: DeviceProfile) -> RankSchedule:
    return schedule_of(Fsdp2Engine(job, trace, ranks[0], device), ranks)
