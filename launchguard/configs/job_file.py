"""launchguard.yaml beside the script: what no other file says (a callable model, wrap classes, precision of a hand-written loop).

model: {source: model:build, kwargs: {layers: 4}, loss: sum,
        inputs: {input_ids: {shape: [batch, seq], dtype: int64, high: 32000}}}
seq_len: 2048
micro_batch_size: 2
device: h100-80-sxm                    # or the cards of a mixed job: [a100-40-sxm, a100-80-sxm], of which the smallest decides
device_used: 3GiB                      # what other processes hold of each card
headroom: 10%
strategy: fsdp2                        # torchrun jobs: fsdp2 | fsdp1 | ddp | single
fsdp: {wrap_classes: [Block], reshard_after_forward: true}
precision: {params: float32, compute: bfloat16, reduce: float32}
lora: {r: 16, target_modules: [q_proj, v_proj]}
optimizer: adamw                       # or {name: adamw, implementation: fused}
lengths: lengths.json                  # of the samples: predicted at the longest and at percentiles
node: {gpus: 8, memory: 1TB}           # of one node of the job, where this machine is not one
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from launchguard import job
from launchguard.configs import _files
from launchguard.errors import InputError
from launchguard.job import InputTensor, LaunchSpec, Origin, Setting
from launchguard.units import dtype_name, parse_bytes

NAME = "launchguard.yaml"
_PARTS: Mapping[str, type] = {
    "model": job.ModelSpec, "precision": job.Precision, "activation_checkpointing": job.ActivationCheckpointing,
    "optimizer": job.OptimizerSpec, "zero": job.ZeroSpec, "fsdp": job.FsdpSpec, "ddp": job.DdpSpec, "lora": job.LoraSpec,
    "quantization": job.QuantizationSpec, "evaluation": job.EvaluationSpec,
    "saving": job.SavingSpec,
}  # fmt: skip
_NOT_FIELDS = ("launch", "versions", "origins", "notes", "lengths", "generation")
_FILES = ("deepspeed", "accelerate", "fsdp_config", "lengths")
_NODE = {"gpus", "memory"}
_SHORT = {"model": "source", "optimizer": "name", "activation_checkpointing": "enabled"}  # section written as one value -> its field
_ALIASES = {"precision.params": "precision.storage", "model.callable": "model.source", "model.path": "model.source"}
_STRATEGIES = ("single", "ddp", "data_parallel", "zero", "fsdp1", "fsdp2")


def find_in(cwd: str, path: str | None) -> tuple[str, dict[str, Any]] | None:
    """As find, before a launch is known: the file asked for, else the one in the working directory."""
    name = path or NAME
    if path is None and not os.path.isfile(_files.resolve_path(name, cwd)):
        return None
    return name, _files.parse_yaml(_files.read_text(name, cwd, "job file"), name, "job file")


def find(launch: LaunchSpec, path: str | None) -> tuple[str, dict[str, Any]] | None:
    """(name, content) of the job file: the one asked for, else launchguard.yaml beside the script or in the working directory."""
    if path is not None:
        return path, _files.parse_yaml(_files.read_text(path, launch.cwd, "job file"), path, "job file")
    folders = [os.path.dirname(launch.script)] if launch.script and not launch.is_module else []
    for folder in (*folders, ""):
        name = os.path.join(folder, NAME)
        if os.path.isfile(_files.resolve_path(name, launch.cwd)):
            return name, _files.parse_yaml(_files.read_text(name, launch.cwd, "job file"), name, "job file")
    return None


def settings_of(name: str, content: Mapping[str, Any]) -> dict[str, Setting]:
    """Dotted field -> setting. Raises InputError for a key that is no field."""
    found: dict[str, Setting] = {}
    for key, value in _flatten(content):
        if key in (*_FILES, "node"):
            continue
        field = _ALIASES.get(key, key)
        origin = Origin(name, key)
        found[field] = Setting(convert(field, value, origin), origin)
        if key == "precision.params":
            found["precision.load"] = found[field]
    memory = _memory_of(name, content)
    return {**found, "host_memory": memory} if memory is not None else found


def gpus_of(name: str, content: Mapping[str, Any]) -> int | None:
    """node: {gpus: N}: GPUs of one node; None when the file does not say."""
    node = content.get("node")
    if node is None:
        return None
    if not isinstance(node, Mapping) or set(node) - _NODE:
        raise InputError(f"node is {node!r}", where=f"{name}:node", help="node: {gpus: 8}")
    gpus = node.get("gpus")
    if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1):
        raise InputError(f"node.gpus is {gpus!r}, not a number of GPUs", where=f"{name}:node.gpus", help="give 1 or more")
    return gpus


def _memory_of(name: str, content: Mapping[str, Any]) -> Setting | None:
    """node: {memory: SIZE}: host RAM of one node in bytes; None when the file does not say."""
    node = content.get("node")
    if not isinstance(node, Mapping) or node.get("memory") is None:
        return None
    origin = Origin(name, "node.memory")
    try:
        return Setting(str(parse_bytes(str(node["memory"]))), origin)
    except ValueError as error:
        raise InputError(str(error), where=str(origin), help="give a size: 512GB, 2TB") from None


def files_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Other files that the job file names."""
    return {key: str(content[key]) for key in _FILES if isinstance(content.get(key), str)}


def _flatten(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in _PARTS and isinstance(value, Mapping):
            for inner, entry in value.items():
                yield f"{key}.{inner}", entry
        elif key in _PARTS and value is None:
            continue  # an empty section
        elif key in _SHORT:
            yield f"{key}.{_SHORT[key]}", value
        else:
            yield str(key), value


# ---------------------------------------------------------------- values
def convert(field: str, value: Any, origin: Origin) -> Any:
    """A value as its JobSpec field wants it. Raises InputError for an unknown field or a value of another type."""
    head, _, rest = field.partition(".")
    owner = _PARTS.get(head) if rest else job.JobSpec
    names = {spec.name for spec in dataclasses.fields(owner)} - set(_NOT_FIELDS) if owner else set()
    if head in _PARTS and not rest:
        raise InputError(f"{field} is a section, not a value", where=str(origin), help=f"{field}: {{{_first_field(head)}: ...}}")
    if owner is None or (rest or head) not in names:
        raise InputError(f"{field} is not a setting of a job", where=str(origin), help=_nearest(field))
    if field == "strategy" and value not in _STRATEGIES:
        raise InputError(f"unknown strategy {value!r}", where=str(origin), help=f"one of {', '.join(_STRATEGIES)}")
    if field == "device" and isinstance(value, (list, tuple)):
        return ",".join(str(name) for name in value)
    if field == "model.inputs":
        return _inputs(value, origin)
    if head == "precision" and rest in ("load", "storage", "compute", "reduce", "autocast") and value is not None:
        return _dtype(value, origin)
    return _coerce(typing.get_type_hints(owner)[rest or head], value, field, origin)


def _first_field(part: str) -> str:
    return dataclasses.fields(_PARTS[part])[0].name


def _nearest(field: str) -> str:
    known = [f"{part}.{spec.name}" for part, owner in _PARTS.items() for spec in dataclasses.fields(owner)]
    known += [spec.name for spec in dataclasses.fields(job.JobSpec) if spec.name not in _NOT_FIELDS]
    close = difflib.get_close_matches(field, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "fields are named as in launchguard check --json: job"


def _dtype(value: Any, origin: Origin) -> str:
    try:
        return dtype_name(str(value))
    except ValueError as error:
        raise InputError(str(error), where=str(origin), help="use bfloat16, float16 or float32") from None


def _coerce(hint: Any, value: Any, field: str, origin: Origin) -> Any:
    """The first alternative of the annotation that the value fits without loss."""
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    for kind in alternatives:
        for accept, make in _KINDS.get(typing.get_origin(kind) or kind, ()):
            if accept(value):
                return make(value)
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in alternatives)
    raise InputError(f"{field} is {value!r}, not a {names}", where=str(origin), help=f"give a {names}")


_KINDS: Mapping[Any, tuple[tuple[Any, Any], ...]] = {
    bool: ((lambda v: isinstance(v, bool), bool),),
    int: ((lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and int(v) == v, int),),
    float: ((lambda v: isinstance(v, (int, float)) and not isinstance(v, bool), float),),
    str: ((lambda v: isinstance(v, str), str), (lambda v: isinstance(v, (int, float)) and not isinstance(v, bool), str)),
    types.NoneType: ((lambda v: v is None, lambda v: None),),
    tuple: ((lambda v: isinstance(v, (list, tuple)), tuple),),
    Mapping: ((lambda v: isinstance(v, Mapping), dict),),
}
_KINDS = {**_KINDS, typing.get_origin(Mapping[str, Any]): _KINDS[Mapping]}


def _inputs(value: Any, origin: Origin) -> dict[str, InputTensor]:
    """inputs: {name: {shape: [batch, seq], dtype: int64, high: 32000}}, or just the shape."""
    if not isinstance(value, Mapping):
        raise InputError("model.inputs is not a mapping of names", where=str(origin), help="inputs: {x: {shape: [batch, 1024]}}")
    tensors = {}
    for name, entry in value.items():
        spec = entry if isinstance(entry, Mapping) else {"shape": entry}
        where = Origin(origin.source, f"{origin.key}.{name}")
        unknown = sorted(set(spec) - {"shape", "dtype", "high"})
        shape = spec.get("shape")
        if unknown or not isinstance(shape, (list, tuple)):
            raise InputError(f"input {name} has {'unknown keys ' + ', '.join(unknown) if unknown else 'no shape'}", where=str(where),
                             help="shape: [batch, seq, 64], dtype: float32, high: 32000")  # fmt: skip
        wrong = [size for size in shape if not (isinstance(size, int) and size > 0) and size not in ("batch", "seq")]
        if wrong:
            raise InputError(f"input {name} has the size {wrong[0]!r}", where=str(where), help="a positive number, batch or seq")
        dtype = _dtype(spec.get("dtype", "float32" if "high" not in spec else "int64"), where)
        tensors[str(name)] = InputTensor(tuple(shape), dtype, spec.get("high"))
    return tensors


def parse_text(field: str, text: Any, origin: Origin) -> Any:
    """A value typed on the command line ("2e8", "true", "[a, b]") for a field."""
    import yaml

    if not isinstance(text, str):
        return convert(field, text, origin)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str):
        try:
            value = float(text)  # YAML 1.1 reads 2e8 as text
        except ValueError:
            value = text
    return convert(field, value, origin)
