"""Host memory of one node: what its ranks hold in main memory, phase by phase. What offloaded ZeRO states need comes from the ZeRO engines.

Left out: files in the page cache, what a data set keeps in memory, and what the CUDA driver takes of main memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launchguard.events import HostPhase, RankSchedule, StepTrace
from launchguard.job import JobSpec, SavingSpec, ZeroSpec
from launchguard.profiles import optimizer, state_bytes
from launchguard.strategies._evaluation import ASSUMED_BATCHES, kept_bytes
from launchguard.strategies._stream import MicroBatch
from launchguard.units import MIB, ceil_div, dtype_bytes, dtype_name

SAFETENSORS_SHARD = 50_000_000_000  # transformers 5.24 modeling_utils.py:save_pretrained, max_shard_size: one file is copied at a time
MAPPED_SINCE = 5  # transformers
# Measured as anonymous memory (RssAnon, Private_Dirty) by tests/strategies/host_worker.py with torch 2.13, transformers 5.24,
# accelerate 1.15, deepspeed 0.19.8 on Linux; a build for CUDA has more code, which is its files' and shared.
PROCESS_BYTES = 310 * MIB
WORKER_BYTES = 10 * MIB
PREFETCHED = 2  # torch 2.13 utils/data/dataloader.py: batches for each worker
SWAPPED_STATES = ("fp32 master partition", "fp32 gradient partition", "exp_avg", "exp_avg_sq")  # labels of the ZeRO engines
HOST_PHASES = ("load", "prepare", "resume", "step_1", "step_2", "evaluation", "save")  # in the order in which they come
Bytes = dict[str, int]


def node_phases(job: JobSpec, trace: StepTrace, schedules: Sequence[RankSchedule]) -> list[HostPhase]:
    """Bytes of the first node by phase. Each phase holds what lasts (offloaded states) and what only it needs; rank 0 is on this node."""
    host = _Host(job, trace)
    ranks = job.launch.nproc_per_node
    lasting = {name: host.swapped(found, ranks) for name, found in _lasting(schedules, ranks).items()}
    settled = lasting.get("step_2") or lasting.get("step_1") or lasting.get("prepare") or {}
    phases = {"load": host.load(), "prepare": lasting.get("prepare", {}), "step_1": lasting.get("step_1", {}), "step_2": settled}
    offloaded = host.fsdp_offload(ranks)
    if job.resume:
        phases["resume"] = {**lasting.get("prepare", {}), **offloaded, **host.resume(ranks)}
    offloaded |= host.saved_activations(trace)
    batches = host.batches(trace)
    for name in ("step_1", "step_2"):
        phases[name] = {**phases[name], **offloaded, **batches}
    if job.evaluation is not None and trace.evaluation is not None:
        phases["evaluation"] = {**settled, **offloaded, **host.evaluation(trace.evaluation, ranks)}
    if job.saving is not None:
        phases["save"] = {**settled, **offloaded, **host.save(ranks)}
    always = host.processes()
    return [
        HostPhase(name, {label: n for label, n in {**found, **always}.items() if n > 0})
        for name, found in sorted(phases.items(), key=lambda item: HOST_PHASES.index(item[0]))
    ]


def _lasting(schedules: Sequence[RankSchedule], ranks: int) -> dict[str, Mapping[str, int]]:
    """What the engines hold, for all ranks of the node: the first kind of rank stands for each."""
    first = schedules[0].host if schedules else ()
    return {phase.name: {label: n * ranks for label, n in phase.bytes_by_label.items()} for phase in first}


class _Host:
    def __init__(self, job: JobSpec, trace: StepTrace) -> None:
        self.job, self.ranks = job, job.launch.nproc_per_node
        self.params = trace.params
        self.numel = sum(p.numel for p in trace.params)
        self.shards = (job.fsdp.shard_group_size if job.fsdp else None) or job.world_size

    def _whole(self, dtype: str) -> int:
        return self.numel * dtype_bytes(dtype)

    def load(self) -> Bytes:
        """What from_pretrained and the way to the device hold. A checkpoint that keeps its dtype is mapped from its file: its pages are the
        page cache's, one for all ranks, and go when room is needed, so they are not counted (transformers 5.24 modeling_utils.py:
        _load_pretrained_model; measured: 2 of 149 MiB). A cast one is a copy for each rank, under cpu_ram_efficient_loading, too: 5.24
        reads the values on every rank (measured), 4.x on a node's first alone. Under zero.Init rank 0 reads them, the others
        have meta tensors.
        A quantised model goes to the device tensor by tensor."""
        if self.job.quantization is not None or self.job.model.config is None:
            return {}
        zero, fsdp = self.job.zero, self.job.fsdp
        whole = self._whole(self.job.precision.load) if self._is_copied() else 0
        if self.job.strategy == "zero" and zero is not None and zero.stage == 3 and zero.zero_init:
            return {} if self._is_mapped() else {"checkpoint on rank 0": self._whole(self._checkpoint_dtype() or self.job.precision.load)}
        if self.job.strategy == "zero" and zero is not None:
            cast = self._whole(zero.dtype) if dtype_name(zero.dtype) != self.job.precision.load else 0
            return {f"model as loaded by each of {self.ranks} ranks": max(whole, cast) * self.ranks}
        whole = max(whole, self._upcast())
        if fsdp is not None and fsdp.cpu_ram_efficient_loading and not self._is_mapped():
            return {"model as loaded by one rank": whole}
        return {f"model as loaded by each of {self.ranks} ranks": whole * self.ranks}

    def _is_mapped(self) -> bool:
        """Does the installed transformers map files? Read in 5.24; older ones are taken to read them, which is an upper bound."""
        return int(self.job.versions.get("transformers", "5").split(".")[0]) >= MAPPED_SINCE

    def _is_copied(self) -> bool:
        return not self._is_mapped() or self._checkpoint_dtype() != self.job.precision.load

    def _checkpoint_dtype(self) -> str | None:
        """As config.json states it; None if it does not."""
        config = self.job.model.config or {}
        stated = config.get("dtype") or config.get("torch_dtype")
        return dtype_name(stated) if isinstance(stated, str) else None

    def _upcast(self) -> int:
        """FSDP2 with mixed precision turns trainable parameters into float32 before they leave the host (accelerate 1.15
        utils/fsdp_utils.py:fsdp2_prepare_model); FSDP1 does it with shards, on the device."""
        precision, fsdp = self.job.precision, self.job.fsdp
        if fsdp is None or fsdp.version != 2 or not fsdp.accelerate_grouping or precision.storage == precision.load:
            return 0
        return sum(p.numel * dtype_bytes(precision.storage if p.requires_grad else precision.load) for p in self.params)

    def swapped(self, lasting: Mapping[str, int], ranks: int) -> Bytes:
        """NVMe offload: states and partitions lie in files, and each rank has pinned buffers to move them through, there from the start:
        buffer_count x the largest sub-group in float32; buffer_count x buffer_size parameters (deepspeed 0.19.8 swap_tensor/utils.py:
        SwapBufferManager, optimizer_utils.py, partitioned_param_swapper.py:_configure_aio; a report of 5 x 2 GiB x 2 bytes agrees)."""
        zero, found = self.job.zero or ZeroSpec(), dict(lasting)
        if zero.offload_optimizer == "nvme":
            partition = ceil_div(sum(p.numel for p in self.params if p.requires_grad), self.job.world_size)
            largest = min(zero.sub_group_size, partition) * dtype_bytes("float32")
            found = {label: n for label, n in found.items() if label not in SWAPPED_STATES}
            found["NVMe swap buffers of the optimizer (pinned)"] = zero.offload_optimizer_buffer_count * largest * ranks
        if zero.offload_param == "nvme":
            found.pop("parameter partition", None)
            buffers = zero.offload_param_buffer_count * zero.offload_param_buffer_size * dtype_bytes(dtype_name(zero.dtype))
            found["NVMe swap buffers of parameters (pinned)"] = buffers * ranks
        return found

    def processes(self) -> Bytes:
        """What a rank's process and its data loader workers hold beside tensors; workers share the rank's pages until they write."""
        found = {"processes (Python and libraries)": PROCESS_BYTES * self.ranks}
        if self.job.dataloader_workers:
            found["data loader workers"] = WORKER_BYTES * self.job.dataloader_workers * self.ranks
        return found

    def batches(self, trace: StepTrace) -> Bytes:
        """Batches that workers have ready: two for each, in shared memory, and the next in pinned memory (torch 2.13 utils/data/
        dataloader.py: prefetch_factor; dataloader_pin_memory of the Trainer)."""
        batch = sum(MicroBatch(trace).input_bytes)
        ready = (PREFETCHED * self.job.dataloader_workers + 1) * batch
        return {"batches ready for the device": ready * self.ranks}

    def saved_activations(self, trace: StepTrace) -> Bytes:
        """What forward keeps on the host for backward: pinned blocks, which torch's allocator makes powers of two and never gives back
        (torch 2.13 autograd/graph.py:save_on_cpu, CachingHostAllocator.h)."""
        return {"saved activations (pinned)": sum(map(_power_of_two, trace.facts.get("saved_on_host", ()))) * self.ranks}

    def resume(self, ranks: int) -> Bytes:
        """What is read from a checkpoint before it is copied (transformers 5.24 trainer.py). ZeRO: each rank the whole 16-bit model of
        stages 0-2, then its own master weights and moments (deepspeed 0.19.8 engine.py:_load_checkpoint, _load_zero_checkpoint, to the
        CPU). FSDP full: FSDP1 the model on every rank, FSDP2 on rank 0; the moments on rank 0 (accelerate 1.15 utils/fsdp_utils.py);
        sharded: into the shards. One process alone reads the moments to the host, several to their
        devices; a model in safetensors is mapped."""
        zero, fsdp = self.job.zero or ZeroSpec(), self.job.fsdp
        trained = sum(p.numel for p in self.params if p.requires_grad)
        saved = self.numel if self.job.lora is None else trained  # of a PEFT model the adapters
        if self.job.strategy == "zero":
            model = saved * dtype_bytes(dtype_name(zero.dtype)) * ranks if zero.stage < 3 else 0
            partition = trained if zero.stage == 0 else ceil_div(trained, self.job.world_size)
            return {"checkpoint as read by its ranks": max(model, 3 * partition * dtype_bytes("float32") * ranks)}
        moments = sum(n for p in self.params if p.requires_grad for _, n in self._states(p.shape, self.job.precision.storage))
        if fsdp is not None and self.job.strategy.startswith("fsdp"):
            if fsdp.state_dict_type != "FULL_STATE_DICT":
                return {}
            readers = ranks if fsdp.version == 1 else 1
            return {"full state dict as read": max(saved * dtype_bytes(self.job.precision.storage) * readers, moments)}
        return {"optimizer states as read": moments} if self.job.world_size == 1 else {}

    def _states(self, shape: tuple[int, ...], dtype: str) -> list[tuple[str, int]]:
        spec = self.job.optimizer
        return state_bytes(optimizer(spec.name), shape, dtype, spec.params, implementation=spec.implementation)

    def fsdp_offload(self, ranks: int) -> Bytes:
        """CPU offload of FSDP: each shard and its gradient in pinned memory, the moments pageable. FSDP2 pins parameter by parameter, and
        torch's pinned allocator rounds each block up to a power of two (torch 2.13 _fsdp_param.py, CachingHostAllocator.h); FSDP1 pins one
        flat shard for each unit, taken here parameter by parameter, too."""
        if self.job.fsdp is None or not self.job.fsdp.offload_params:
            return {}
        dtype = self.job.precision.storage
        shards = [(ceil_div(p.numel, self.shards), p.requires_grad) for p in self.params]
        pinned = sum(_power_of_two(n * dtype_bytes(dtype)) for n, _ in shards)
        gradients = sum(_power_of_two(n * dtype_bytes(dtype)) for n, trainable in shards if trainable)
        states = sum(nbytes for n, trainable in shards if trainable for _, nbytes in self._states((n,), dtype))
        return {
            "offloaded parameter shards (pinned)": pinned * ranks,
            "offloaded gradient shards (pinned)": gradients * ranks,
            "offloaded optimizer states": states * ranks,
        }

    def evaluation(self, batch: StepTrace, ranks: int) -> Bytes:
        """Every rank has all predictions as arrays in the end, bfloat16 as float32 (transformers 5.24 trainer_pt_utils.py:nested_numpify);
        with accumulation steps the old array and the new one coexist while they are joined (EvalLoopContainer.to_cpu_and_numpy)."""
        spec = self.job.evaluation
        if spec is None or spec.loss_only or spec.per_batch:
            return {}
        widened = 2 if any(p.dtype == "bfloat16" for p in batch.predictions) and not spec.reduced else 1
        every = sum(kept_bytes(spec, batch)) * widened * self.job.world_size
        batches = spec.batches or max(ASSUMED_BATCHES, spec.accumulation_steps or 0)
        copies = 2 if spec.accumulation_steps and spec.concatenate and spec.accumulation_steps < batches else 1
        return {"predictions of the evaluation": every * batches * copies * ranks}

    def save(self, ranks: int) -> Bytes:
        """What is gathered on rank 0's host or copied there. FSDP full: the model, then the optimizer's moments (accelerate 1.15
        utils/fsdp_utils.py:save_fsdp_model, save_fsdp_optimizer); sharded: each rank its own shard. ZeRO-3: 16-bit weights on rank 0
        (deepspeed 0.19.8 engine.py:_zero3_consolidated_16bit_state_dict). ZeRO 0-2: a copy on every rank (accelerate 1.15
        accelerator.py:get_state_dict, clone_tensors_for_torch_save). Otherwise one file at a time."""
        spec = self.job.saving
        assert spec is not None
        written = (self._library_save(spec, ranks) if spec.library else {}, self._script_save(spec.script, ranks))
        return max(written, key=lambda found: sum(found.values()))

    def _script_save(self, script: str | None, ranks: int) -> Bytes:
        """What the script gathers in host memory by itself."""
        if script == "float32":  # deepspeed 0.19.8 utils/zero_to_fp32.py: the weights alone, the states' files are mapped
            return {"float32 weights from the ZeRO checkpoint": self._whole("float32")}
        whole = self._whole(self.job.zero.dtype if self.job.strategy == "zero" and self.job.zero else self.job.precision.storage)
        places = {
            "rank 0": {"full state dict on rank 0": whole},
            "every host": {f"full state dict on each of {ranks} ranks": whole * ranks},
            "sharded": {"sharded state dicts": whole // self.shards * ranks},
        }
        return places.get(script or "", {})

    def _library_save(self, spec: SavingSpec, ranks: int) -> Bytes:
        zero, fsdp = self.job.zero or ZeroSpec(), self.job.fsdp
        if fsdp is not None and self.job.strategy.startswith("fsdp"):
            trained = sum(p.numel for p in self.params if p.requires_grad) * dtype_bytes(self.job.precision.storage)
            model, states = self._whole(self.job.precision.storage), 2 * trained if spec.optimizer else 0
            if fsdp.state_dict_type == "FULL_STATE_DICT":
                return {"full state dict on rank 0": max(model, states)}
            return {"sharded state dicts": max(model, states) // self.shards * ranks}
        if self.job.strategy == "zero":
            weights = self._whole(zero.dtype)
            if zero.stage == 3:
                return {"16-bit weights on rank 0": weights} if zero.stage3_gather_16bit_weights_on_model_save else {}
            return {f"model copied by each of {ranks} ranks": weights * ranks}
        written = sum(p.numel for p in self.params if p.requires_grad or self.job.lora is None) * dtype_bytes(self.job.precision.storage)
        return {"weights of one file": min(written, SAFETENSORS_SHARD)}


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
