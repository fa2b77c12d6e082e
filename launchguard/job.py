"""The job as values: what will be launched (LaunchSpec) and what it will do (JobSpec).

Every user-facing value is first a Setting under a dotted name ("zero.stage"), with the Origin that won. `build_job` turns the
settings into the nested, frozen JobSpec; the origins travel with it, so that a report can name the file and key behind a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launchguard.errors import NotTold


@dataclass(frozen=True)
class Origin:
    """Where a value comes from. source: a file as the user wrote it, "command line", an environment variable, or
    "default of transformers 5.24.0"; key: the key or flag in it, in that source's own spelling."""

    source: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.key}" if self.key else self.source


@dataclass(frozen=True)
class Setting:
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Note:
    """Something the user should know. code: stable ("LG201"); severity: "error" | "warning" | "info"."""

    code: str
    severity: str
    message: str
    origin: str = ""


TRAINER_LOOPS = ("trainer", "sft", "dpo")  # loops of the Hugging Face Trainer and its children


class Settings:
    """Dotted field name -> Setting. A later `put` wins; what it displaced is kept, for notes on conflicting sources."""

    def __init__(self) -> None:
        self._settings: dict[str, Setting] = {}
        self.displaced: dict[str, list[Setting]] = {}
        self.notes: list[Note] = []

    def put(self, field_name: str, value: Any, origin: Origin) -> None:
        """The value of a field from a stronger source than all before."""
        old = self._settings.get(field_name)
        if old is not None and old.value != value:
            self.displaced.setdefault(field_name, []).append(old)
        self._settings[field_name] = Setting(value, origin)

    def default(self, field_name: str, value: Any, origin: Origin) -> None:
        """The value of a field unless some source has already given one."""
        if field_name not in self._settings:
            self._settings[field_name] = Setting(value, origin)

    def get(self, field_name: str, default: Any = None) -> Any:
        setting = self._settings.get(field_name)
        return default if setting is None else setting.value

    def origin(self, field_name: str) -> Origin | None:
        setting = self._settings.get(field_name)
        return None if setting is None else setting.origin

    def items(self) -> Iterator[tuple[str, Setting]]:
        yield from self._settings.items()

    def __contains__(self, field_name: str) -> bool:
        return field_name in self._settings

    def note(self, code: str, severity: str, message: str, origin: Origin | str = "") -> None:
        made = Note(code, severity, message, str(origin))
        if made not in self.notes:  # two readers may come across the same fact
            self.notes.append(made)


# ---------------------------------------------------------------- the launch
@dataclass(frozen=True)
class LaunchSpec:
    """A launch command as its own launcher reads it.

    launcher: accelerate | deepspeed | torchrun | python; argv: the whole command, exec'ed unchanged by `run`;
    script: path as given, or a module name when is_module; environment: what the launcher adds to the environment of
    every rank beyond RANK and friends (accelerate's ACCELERATE_*, FSDP_*); arguments: the launcher's own resolved
    arguments by name (accelerate's namespace after the merge with its config file), each with its origin; gpus_in_sight: that each
    process sees, where no launcher gives it one.
    """

    launcher: str
    argv: tuple[str, ...]
    cwd: str
    script: str | None
    script_args: tuple[str, ...] = ()
    is_module: bool = False
    nnodes: int = 1
    nproc_per_node: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Setting] = field(default_factory=dict)
    config_file: str | None = None
    notes: tuple[Note, ...] = ()
    gpus_in_sight: int = 1
    world_size_origin: Origin = Origin("default", "one process")

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


# ---------------------------------------------------------------- the job
@dataclass(frozen=True)
class InputTensor:
    """One model input. shape: ints, or "batch" / "seq" for the micro-batch size and the sequence length; high: exclusive
    upper bound of integer inputs."""

    shape: tuple[int | str, ...]
    dtype: str = "int64"
    high: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """source: directory or hub id of a Hugging Face config, or "module:callable"; config: the parsed config.json, None for
    a callable; task: auto class ("AutoModelForCausalLM"), None: from config["architectures"]; inputs: for a callable;
    loss: how a scalar is made of a callable's output ("output.loss", "output", "sum"); python_path: where module: is imported from."""

    source: str
    config: Mapping[str, Any] | None = None
    task: str | None = None
    attn_implementation: str | None = None
    use_cache: bool | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, InputTensor] = field(default_factory=dict)
    loss: str | None = None
    python_path: str = "."
    use_liger_kernel: bool = False
    liger_kernel_config: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Precision:
    """dtypes by canonical name.

    load: of the parameters as loaded; storage: of trainable parameters once wrapped (shards, grads and optimizer follow it);
    compute: of the parameters that forward sees (FSDP mixed precision or DeepSpeed cast them; else = storage);
    autocast: dtype of the autocast region around forward, None without; reduce: of gradient reduction under FSDP;
    float32_outputs: Accelerate's ConvertOutputsToFp32 around the model.
    """

    load: str = "float32"
    storage: str = "float32"
    compute: str = "float32"
    autocast: str | None = None
    reduce: str = "float32"
    float32_outputs: bool = False


@dataclass(frozen=True)
class ActivationCheckpointing:
    """via: "model" (HF gradient_checkpointing_enable) or "fsdp" (checkpoint_wrapper round every wrapped layer, or round `classes`);
    every_n_layers, offload (what is saved waits in pinned host memory): keyword arguments of transformers' activation_checkpointing_enable.
    """

    enabled: bool = False
    via: str = "model"
    use_reentrant: bool = False
    every_n_layers: int = 1
    offload: bool = False
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerSpec:
    """name: key of profiles/optimizers ("adamw"); implementation: "fused" | "foreach" | "for_loop" | "deepspeed_fused" | "cpu";
    params: constructor arguments that change memory (amsgrad, momentum ...)."""

    name: str = "adamw"
    implementation: str = "foreach"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ZeroSpec:
    """DeepSpeed's own key names; sizes of buckets in elements. dtype: of the engine's parameters (bf16, fp16 or float32)."""

    stage: int = 0
    dtype: str = "float32"
    grad_accum_dtype: str | None = None
    communication_data_type: str | None = None
    contiguous_gradients: bool = True
    overlap_comm: bool = False
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    round_robin_gradients: bool = False
    zero_hpz_partition_size: int = 1
    offload_optimizer: str = "none"
    offload_param: str = "none"
    offload_pin_memory: bool = True
    offload_ratio: float = 1.0
    offload_optimizer_buffer_count: int = 4
    offload_param_buffer_count: int = 5
    offload_param_buffer_size: int = 100_000_000
    zero_init: bool = False
    torch_autocast: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False
    fp16_master_weights_and_grads: bool = False
    immediate_grad_update: bool = False


@dataclass(frozen=True)
class FsdpSpec:
    """Names of Accelerate's and torch's FSDP options. version 1 or 2; wrap_policy: TRANSFORMER_BASED_WRAP | SIZE_BASED_WRAP |
    NO_WRAP | MANUAL (module:callable jobs: wrap_classes); reshard_after_forward: version 2, bool or int;
    state_dict_type: FULL_STATE_DICT | SHARDED_STATE_DICT | LOCAL_STATE_DICT;
    accelerate_grouping: Accelerate's fsdp2_prepare_model (embedding and tail in groups of their own)."""

    version: int = 1
    sharding_strategy: str = "FULL_SHARD"
    reshard_after_forward: bool | int = True
    wrap_policy: str = "NO_WRAP"
    wrap_classes: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    use_orig_params: bool = True
    backward_prefetch: str | None = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    offload_params: bool = False
    cpu_ram_efficient_loading: bool = False
    sync_module_states: bool = False
    accelerate_grouping: bool = True
    sync_each_batch: bool = False
    state_dict_type: str = "FULL_STATE_DICT"
    shard_group_size: int | None = None  # HYBRID_SHARD, HSDP: ranks that share one copy; None: the world


@dataclass(frozen=True)
class DdpSpec:
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    comm_hook: str | None = None


@dataclass(frozen=True)
class LoraSpec:
    """Arguments of peft.LoraConfig that change memory; autocast_adapter_dtype: adapters in float32 (PEFT's default)."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str | None = None
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    bias: str = "none"
    autocast_adapter_dtype: bool = True


@dataclass(frozen=True)
class QuantizationSpec:
    """method: "nf4" | "fp4" | "int8" (bitsandbytes); quant_storage: dtype in which 4-bit weights are packed: FSDP shards floating ones;
    prepare_kbit: PEFT's prepare_model_for_kbit_training is called; trl_casts: an older TRL casts norms and heads behind the adapters."""

    method: str
    double_quant: bool = False
    compute_dtype: str = "bfloat16"
    prepare_kbit: bool = True
    trl_casts: bool = False
    quant_storage: str = "uint8"

    @property
    def four_bit(self) -> bool:
        """bitsandbytes' packed weights (Params4bit)."""
        return self.method in ("nf4", "fp4")


@dataclass(frozen=True)
class EvaluationSpec:
    """Evaluation by the Trainer. batch_size: per device; loss_only: the predictions of a batch are dropped; reduced: the script's
    preprocess_logits_for_metrics makes them small; accumulation_steps: batches whose predictions stay on the device, None: all;
    concatenate: into one tensor (eval_do_concat_batches); per_batch: metrics are taken batch by batch (batch_eval_metrics);
    batches: of the evaluation set per rank, None: not known."""

    batch_size: int = 8
    loss_only: bool = True
    reduced: bool = False
    accumulation_steps: int | None = None
    concatenate: bool = True
    per_batch: bool = False
    batches: int | None = None


@dataclass(frozen=True)
class GenerationSpec:
    """Tokens that the job generates itself. by: "evaluation" (predict_with_generate) | "rollout" (a trainer of TRL's); sequences: of one
    call on one rank, beams included; cache_bytes: keys and values of all layers at the longest; layer_bytes: of one tensor among them;
    vocabulary: entries of the scores of a step; whole: the model is gathered on every device meanwhile; sync: weights are handed to an
    engine of their own, tensor by tensor."""

    by: str
    sequences: int = 1
    cache_bytes: int = 0
    layer_bytes: int = 0
    vocabulary: int = 0
    whole: bool = False
    sync: bool = False


@dataclass(frozen=True)
class LengthSpec:
    """How long batches are. source: the file; batch_tokens: ("p50" | "p90" | "p99" | "max", tokens of a row); worst: which batch is it."""

    source: str
    batch_tokens: tuple[tuple[str, int], ...]
    worst: str


@dataclass(frozen=True)
class SavingSpec:
    """Checkpoints. library: the Trainer or Accelerate writes them; optimizer: its states too (not save_only_model); script: what the
    script makes whole by itself, and where: "device" (of every rank) | "rank 0" (its host memory) | "every host" | "sharded" (nothing) |
    "float32" (weights read from a ZeRO checkpoint) | None."""

    optimizer: bool = True
    library: bool = True
    script: str | None = None


@dataclass(frozen=True)
class JobSpec:
    """One training job, as every rank will run it.

    loop: whose training loop ("trainer" | "sft" | "dpo" | "accelerate" | "deepspeed" | "torch"): decides when gradients are clipped
    and outputs dropped; strategy: key of strategies/ ("single" | "ddp" | "data_parallel" | "zero" | "fsdp1" | "fsdp2");
    cards: GPUs of "data_parallel"'s one process; reference: a frozen second model stays beside the trained one (DPO);
    resume: a checkpoint is loaded before the first step; dataloader_workers: processes that load data, for each rank.
    device: key of profiles/devices, "auto", a byte count, or several of them with commas: the cards of a mixed job; device_used: what other
    processes hold of each card, a size; device_share: what an engine beside the training takes of it (vLLM);
    headroom: "10%" or "6GiB"; host_memory: of a node, "auto" or a size;
    allocator_conf: PYTORCH_CUDA_ALLOC_CONF.
    """

    launch: LaunchSpec
    model: ModelSpec
    loop: str = "torch"
    strategy: str = "single"
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    seq_len: int = 1024
    max_grad_norm: float | None = None
    outputs_alive_in_backward: bool = False
    outputs_deleted: bool = False  # by the loop, behind backward; else they live until the next forward has made new ones
    zero_grad_set_to_none: bool = True
    precision: Precision = Precision()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    optimizer: OptimizerSpec = OptimizerSpec()
    zero: ZeroSpec | None = None
    fsdp: FsdpSpec | None = None
    ddp: DdpSpec | None = None
    lora: LoraSpec | None = None
    quantization: QuantizationSpec | None = None
    evaluation: EvaluationSpec | None = None
    saving: SavingSpec | None = None
    lengths: LengthSpec | None = None
    generation: GenerationSpec | None = None
    reference: bool = False
    resume: bool = False
    dataloader_workers: int = 0
    cards: int = 1
    compile: bool = False
    device: str = "auto"
    device_used: str = "0"
    device_share: float = 0.0
    headroom: str = "10%"
    host_memory: str = "auto"
    allocator_conf: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def devices(self) -> int:
        """GPUs of the job: one for each rank, or the cards of its only process."""
        return self.cards if self.strategy == "data_parallel" else self.world_size

    @property
    def device_word(self) -> str:
        """What reports call whom a prediction is for."""
        return "card" if self.strategy == "data_parallel" else "rank"

    def origin(self, field_name: str) -> Origin:
        """Origin of a dotted field; a field nobody set is launchguard's own default."""
        return self.origins.get(field_name, Origin("default of launchguard", field_name))

    def get(self, field_name: str) -> Any:
        """Value of a dotted field; None when its part of the job is absent."""
        value: Any = self
        for part in field_name.split("."):
            value = None if value is None else getattr(value, part)
        return value

    def changed(self, changes: Mapping[str, Any]) -> JobSpec:
        """A copy with dotted fields replaced; origins stay, so that advice can name the key to edit."""
        job = self
        for name, value in changes.items():
            head, _, rest = name.partition(".")
            part = dataclasses.replace(getattr(job, head), **{rest: value}) if rest else value
            job = dataclasses.replace(job, **{head: part})
        return job


_PARTS: dict[str, type] = {
    "model": ModelSpec, "precision": Precision, "activation_checkpointing": ActivationCheckpointing, "optimizer": OptimizerSpec,
    "zero": ZeroSpec, "fsdp": FsdpSpec, "ddp": DdpSpec, "lora": LoraSpec, "quantization": QuantizationSpec,
    "evaluation": EvaluationSpec, "saving": SavingSpec,
}  # fmt: skip


def build_job(launch: LaunchSpec, settings: Settings, versions: Mapping[str, str] | None = None) -> JobSpec:
    """The JobSpec of dotted settings. A part (zero, fsdp, lora ...) exists when one of its fields was set.
    Raises NotTold when no model was given."""
    plain: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        head, _, rest = name.partition(".")
        if rest:
            parts.setdefault(head, {})[rest] = setting.value
        else:
            plain[name] = setting.value
    if "source" not in parts.get("model", {}):
        raise NotTold("the launch command names no model", where=launch.script or " ".join(launch.argv),
                      help="give it: launchguard check --model DIR_OR_ID_OR_module:callable -- ...")  # fmt: skip
    built = {name: _PARTS[name](**values) for name, values in parts.items()}
    origins = {name: setting.origin for name, setting in settings.items()}
    return JobSpec(launch=launch, versions=versions or {}, origins=origins, notes=launch.notes + tuple(settings.notes), **plain, **built)
