"""Everything a trace depends on, as one JSON-able value: what the worker gets and what the cache is keyed by. No torch here."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchguard import __version__
from launchguard.errors import InputError
from launchguard.fsdp_units import peft_policy
from launchguard.installed import version_of, versions
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "trl", "liger-kernel")


@dataclass(frozen=True)
class TraceRequest:
    """config: parsed config.json, or None with `factory` ("module:callable", imported from python_path).

    compute: dtype to which every floating parameter is cast for forward (FSDP mixed precision, DeepSpeed), None: as loaded;
    checkpointing: None, or ActivationCheckpointing's fields and "classes"; card: (major, minor, sms, threads per SM);
    flat: FsdpSpec fields when FSDP1 may flatten frozen and trainable parameters into one, with "peft" (PEFT's wrap policy) and "storage",
    the dtype that PEFT then finds in the adapters;
    liger: TrainingArguments.liger_kernel_config where Liger's kernels are used and the package is installed here, else None;
    fused_lm_head: TRL's SFTTrainer computes log-probabilities in chunks instead of logits (trl 1.16 trainer/sft_trainer.py);
    first: None, or for a first micro-batch that differs the dtype to which adapters' inputs are cast in it;
    zero3_linear: linear layers are DeepSpeed's, which differ within autocast (trace/zero3_linear.py);
    adapters_stay: the cast to the compute dtype leaves what is trained alone;
    evaluation: None for a training step, "loss" or "predictions" for a batch of evaluation and what it is run for.
    """

    config: dict[str, Any] | None
    factory: str | None
    python_path: str
    task: str | None
    attn_implementation: str | None
    use_cache: bool | None
    kwargs: dict[str, Any]
    inputs: dict[str, Any]
    loss: str | None
    batch: int
    seq: int
    load: str
    compute: str | None
    autocast: str | None
    float32_outputs: bool
    outputs_alive: bool
    lora: dict[str, Any] | None
    quantization: dict[str, Any] | None
    input_require_grads: bool
    checkpointing: dict[str, Any] | None
    card: tuple[int, int, int, int]
    liger: dict[str, bool] | None = None
    fused_lm_head: bool = False
    evaluation: str | None = None
    flat: dict[str, Any] | None = None
    zero3_linear: bool = False
    adapters_stay: bool = False
    first: str | None = None
    source_hash: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def key(self) -> str:
        """Name in the cache: a hash over every field, launchguard's version included."""
        text = json.dumps([__version__, _own_sources(), dataclasses.asdict(self)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def request_of(job: JobSpec, device: DeviceProfile) -> TraceRequest:
    """The trace that a job needs. Jobs that differ only in how state is sharded share one."""
    factory = job.model.source if job.model.config is None else None
    casts = job.strategy == "zero" or (job.strategy in ("fsdp1", "fsdp2") and job.precision.compute != job.precision.storage)
    return TraceRequest(
        config=_plain(job.model.config),
        factory=factory,
        python_path=job.model.python_path,
        task=job.model.task,
        attn_implementation=job.model.attn_implementation,
        use_cache=job.model.use_cache,
        kwargs=dict(job.model.kwargs),
        inputs={name: dataclasses.asdict(t) for name, t in job.model.inputs.items()},
        loss=job.model.loss,
        batch=job.micro_batch_size,
        seq=job.seq_len,
        load=job.precision.load,
        compute=job.precision.compute if casts else None,
        autocast=job.precision.autocast,
        float32_outputs=job.precision.float32_outputs,
        outputs_alive=job.outputs_alive_in_backward,
        lora=None if job.lora is None else _plain(dataclasses.asdict(job.lora)),
        quantization=None if job.quantization is None else dataclasses.asdict(job.quantization),
        input_require_grads=job.lora is not None and job.activation_checkpointing.enabled and _wants_input_grads(job),
        checkpointing=_checkpointing(job),
        card=(*(device.compute_capability or (8, 0)), device.sms or 108, device.max_threads_per_sm or 2048),
        liger=_liger(job),
        fused_lm_head=job.loop == "sft" and job.model.config is not None and _trl_fuses(),
        flat=_flat(job),
        zero3_linear=job.zero is not None and job.zero.stage == 3 and job.precision.autocast is not None,
        adapters_stay=adapters_stay(job),
        source_hash=_factory_hash(factory, job.model.python_path) if factory else "",
        versions={**versions(LIBRARIES), **job.versions},
    )


def requests_of(job: JobSpec, device: DeviceProfile) -> list[TraceRequest]:
    """The training step, one batch of evaluation when there is one, and the first micro-batch where it differs from later ones."""
    step, evaluation = request_of(job, device), job.evaluation
    requests = [step]
    if evaluation is not None:
        kind = "loss" if evaluation.loss_only else "predictions"
        requests.append(dataclasses.replace(step, evaluation=kind, batch=evaluation.batch_size, outputs_alive=False))
    if seen_first(job) is not None:
        requests.append(dataclasses.replace(step, first=seen_first(job)))
    return requests


def adapters_stay(job: JobSpec) -> bool:
    """Do adapters keep the float32 that PEFT made them in? DeepSpeed casts a module's parameters unless zero.Init has made some of them;
    those that PEFT adds afterwards are then partitioned as they are (deepspeed 0.19.8 engine.py:_cast_module_mixed_precision)."""
    zero = job.zero
    return job.lora is not None and job.lora.autocast_adapter_dtype and zero is not None and zero.stage == 3 and zero.zero_init


def seen_first(job: JobSpec) -> str | None:
    """The dtype in which PEFT sees adapters in units of their own during the first micro-batch, and casts their inputs to it, where later
    ones differ (peft 0.21 tuners/tuners_utils.py:_cast_input_dtype). FSDP1 makes views of a unit's parameters when it wraps, before
    Accelerate upcasts the flat ones; after a gather they are of the compute dtype, with use_orig_params after a reshard of that of the
    shards (torch 2.13 _flat_param.py:_use_unsharded_views, _use_sharded_views)."""
    precision, fsdp = job.precision, job.fsdp
    if job.strategy != "fsdp1" or fsdp is None or job.lora is None or not peft_policy(job) or precision.compute == precision.storage:
        return None
    wrapped = "float32" if job.lora.autocast_adapter_dtype else precision.load
    return wrapped if wrapped != (precision.storage if fsdp.use_orig_params else precision.compute) else None


def _wants_input_grads(job: JobSpec) -> bool:
    """Who calls enable_input_require_grads for adapters under checkpointing: TRL, reentrant Trainers, and hand-written loops by custom;
    the plain Trainer with non-reentrant checkpointing does not (transformers 5.24 modeling_utils, trl 1.16 sft_trainer)."""
    return job.loop != "trainer" or job.activation_checkpointing.use_reentrant or job.quantization is not None


def _flat(job: JobSpec) -> dict[str, Any] | None:
    """How FSDP1 groups parameters, where some may be frozen. Without use_orig_params torch refuses a unit that mixes them."""
    may_be_frozen = job.lora is not None or job.model.config is None
    if job.strategy != "fsdp1" or job.fsdp is None or not job.fsdp.use_orig_params or not may_be_frozen:
        return None
    names = ("version", "wrap_policy", "wrap_classes", "min_num_params")
    return {**{name: getattr(job.fsdp, name) for name in names}, "peft": peft_policy(job), "storage": job.precision.storage}


def _checkpointing(job: JobSpec) -> dict[str, Any] | None:
    ckpt = job.activation_checkpointing
    if not ckpt.enabled:
        return None
    classes = list(ckpt.classes or job.fsdp.wrap_classes) if job.fsdp is not None and ckpt.via == "fsdp" else []
    return {**dataclasses.asdict(ckpt), "classes": classes}


def _liger(job: JobSpec) -> dict[str, bool] | None:
    """TRL's SFTTrainer has a fused head of its own and takes Liger's layers alone (trl 1.16 trainer/sft_trainer.py:__init__)."""
    if not job.model.use_liger_kernel or version_of("liger-kernel") is None or job.model.config is None:
        return None
    fused = {"fused_linear_cross_entropy": False} if job.loop == "sft" and _trl_fuses() else {}
    return {**job.model.liger_kernel_config, **fused}


def _trl_fuses() -> bool:
    """Whether the installed TRL has the fused head."""
    try:
        found = importlib.util.find_spec("trl")
    except ValueError:
        return False
    return found is not None and found.origin is not None and (Path(found.origin).parent / "kernels" / "chunked_logprob.py").is_file()


def _plain(value: Any) -> Any:
    return None if value is None else json.loads(json.dumps(value, default=str))


def _factory_hash(factory: str, python_path: str) -> str:
    """Hash of the file that defines the factory; a change in files that it imports is not seen (say --no-cache then)."""
    path = Path(python_path, *factory.split(":")[0].split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return hashlib.sha256(candidate.read_bytes()).hexdigest()
    if importlib.util.find_spec(factory.split(":")[0].split(".")[0]) is None:
        raise InputError(f"no module {factory.split(':')[0]!r} under {python_path}", where=f"--model {factory}",
                         help="run launchguard from the folder that holds the module, or set PYTHONPATH")  # fmt: skip
    return ""


@functools.cache
def _own_sources() -> str:
    """Sizes and times of this room's files: while launchguard is being developed, an edit makes a new key."""
    return ",".join(f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in sorted(Path(__file__).parent.glob("*.py")))
