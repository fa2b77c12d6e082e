"""Host memory of one node: what its ranks hold in main memory, phase by phase. What offloaded ZeRO states need comes from the ZeRO engines.

Left out: the processes' own code and heap, files in the page cache, data loader workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launchguard.events import HostPhase, RankSchedule, StepTrace
from launchguard.job import JobSpec, ZeroSpec
from launchguard.profiles import optimizer, state_bytes
from launchguard.strategies._evaluation import ASSUMED_BATCHES, kept_bytes
from launchguard.units import ceil_div, dtype_bytes, dtype_name

SAFETENSORS_SHARD = 50_000_000_000  # transformers 5.24 modeling_utils.py:save_pretrained, max_shard_size: one file is copied at a time
Bytes = dict[str, int]


def node_phases(job: JobSpec, trace: StepTrace, schedules: Sequence[RankSchedule]) -> list[HostPhase]:
    """Bytes of the first node by phase. Each phase holds what lasts (offloaded states) and what only it needs; rank 0 is on this node."""
    host = _Host(job, trace)
    ranks = job.launch.nproc_per_node
    lasting = _lasting(schedules, ranks)
    settled = lasting.get("step_2") or lasting.get("step_1") or lasting.get("prepare") or {}
    phases = {"load": host.load(), "prepare": lasting.get("prepare", {}), "step_1": lasting.get("step_1", {}), "step_2": settled}
    offloaded = host.fsdp_offload(ranks)
    for name in ("step_1", "step_2"):
        phases[name] = {**phases[name], **offloaded}
    if job.evaluation is not None and trace.evaluation is not None:
        phases["evaluation"] = {**settled, **offloaded, **host.evaluation(trace.evaluation, ranks)}
    if job.saving is not None:
        phases["save"] = {**settled, **offloaded, **host.save(ranks)}
    return [HostPhase(name, {label: n for label, n in found.items() if n > 0}) for name, found in phases.items() if any(found.values())]


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
        """from_pretrained puts a whole copy into every rank's main memory (transformers 5.24 modeling_utils.py). Under
        cpu_ram_efficient_loading only a node's first rank has values, the others meta or untouched memory; under zero.Init only rank 0
        reads the checkpoint. A quantised model goes to the device tensor by tensor."""
        if self.job.quantization is not None or self.job.model.config is None:
            return {}
        zero, fsdp = self.job.zero, self.job.fsdp
        if self.job.strategy == "zero" and zero is not None and zero.stage == 3 and zero.zero_init:
            return {"checkpoint on rank 0": self._whole(self._checkpoint_dtype())}
        if fsdp is not None and fsdp.cpu_ram_efficient_loading:
            return {"model as loaded by one rank": self._whole(self.job.precision.load)}
        return {f"model as loaded by each of {self.ranks} ranks": self._whole(self.job.precision.load) * self.ranks}

    def _checkpoint_dtype(self) -> str:
        config = self.job.model.config or {}
        stated = config.get("dtype") or config.get("torch_dtype")
        return dtype_name(stated) if isinstance(stated, str) else self.job.precision.load

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
        profile = optimizer(self.job.optimizer.name)
        states = sum(
            nbytes
            for n, trainable in shards
            if trainable
            for _, nbytes in state_bytes(profile, (n,), dtype, self.job.optimizer.params, implementation=self.job.optimizer.implementation)
        )
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
        spec, zero, fsdp = self.job.saving, self.job.zero or ZeroSpec(), self.job.fsdp
        assert spec is not None
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
