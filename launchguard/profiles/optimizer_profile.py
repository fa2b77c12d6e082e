"""Optimizers: which state tensors they keep per parameter, and what step() needs beside them.

A profile is declarative: a shape rule and a dtype rule per state tensor, chosen from the few below. What a table cannot say (flat
partitions of ZeRO, sharding) is a strategy's business: it asks with the shape that its optimizer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from launchguard.profiles.reading import profile_names, read_profile, unknown_name
from launchguard.units import ceil_div, dtype_bytes

_HELP = "an optimizer is one file in launchguard/profiles/optimizers; name the nearest one"

_LOW_PRECISION_BYTES = 2


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of one parameter.

    shape: "like_param" | "scalar" | "rows" (all dimensions but the last) | "cols" (all but the second to last) | "rows_kept" and
    "cols_kept" (the same with the dropped dimension as 1) | "blocks" (one per block_size elements) | "packed" (two elements per byte) |
    "book" (block_size, whatever the parameter's shape);
    dtype: "param" or a dtype name; when: constructor argument that must be truthy; device: "param" | "cpu" | "step" (host unless
    the implementation is fused or capturable); min_ndim..max_ndim: parameters that have it.
    min_numel, block_multiple: parameters under that size, or of a numel that is no such multiple, take small_dtype and the parameter's own
    shape, or do not have it when small_dtype is None; repeat: leading dimension of stacked states; paged: False stays on the device;
    low_precision: only for parameters of two bytes; implementation: only under that one.
    """

    name: str
    shape: str
    dtype: str
    when: str | None = None
    device: str = "param"
    min_ndim: int = 0
    max_ndim: int | None = None
    min_numel: int = 0
    block_size: int = 0
    block_multiple: int = 1
    small_dtype: str | None = None
    repeat: int = 1
    paged: bool = True
    low_precision: bool = False
    implementation: str | None = None


@dataclass(frozen=True)
class Temporaries:
    """Bytes alive at the peak of one step(), in units of parameter bytes (the parameter's dtype).

    copies: times all parameters of the group; largest: times the largest parameter, largest_low_precision the same for dtypes of two bytes;
    previous: times the parameter stepped before, whose last temporary is still bound; when: constructor argument that must be truthy.
    """

    copies: float = 0.0
    largest: float = 0.0
    largest_low_precision: float | None = None
    previous: float = 0.0
    when: str | None = None


@dataclass(frozen=True)
class OptimizerProfile:
    """states: in the order the class makes them; created: "first_step" | "construction"; temporaries: by implementation;
    default_implementation: what the class takes on CUDA; paged: states of paged_min_numel elements and more live in managed memory;
    checked: a test compares it with the real class."""

    name: str
    torch_class: str
    states: tuple[StateTensor, ...]
    created: str
    temporaries: Mapping[str, tuple[Temporaries, ...]]
    default_implementation: str
    source: str
    checked: bool
    paged: bool = False
    paged_min_numel: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    def argument(self, name: str, params: Mapping[str, Any]) -> Any:
        """A constructor argument: the user's, else the class's default; None when neither is known."""
        return params.get(name, self.defaults.get(name))


class TensorSpec(NamedTuple):
    """One state tensor as it will be made. device: "param" (the parameter's) | "cpu" | "paged" (CUDA managed memory)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str

    @property
    def nbytes(self) -> int:
        return _numel(self.shape) * dtype_bytes(self.dtype)


@cache
def optimizer(name: str) -> OptimizerProfile:
    """The profile of an optimizer by file name or alias, in any case ("AdamW", "adamw_torch_fused"). InputError when unknown."""
    key = name.strip().lower()
    if key in profile_names("optimizers"):
        return _read(key)
    for profile in optimizers():
        if key in profile.aliases or key == profile.torch_class.lower():
            return profile
    known = [alias for profile in optimizers() for alias in (profile.name, *profile.aliases)]
    raise unknown_name("optimizer", name, known, _HELP)


@cache
def optimizers() -> tuple[OptimizerProfile, ...]:
    """Every known optimizer, by name. Parses all files."""
    return tuple(_read(key) for key in profile_names("optimizers"))


@cache
def _read(key: str) -> OptimizerProfile:
    data = read_profile(f"optimizers/{key}.yaml")
    temporaries = {how: tuple(Temporaries(**rule) for rule in rules) for how, rules in data["temporaries"].items()}
    return OptimizerProfile(
        name=key,
        torch_class=data["torch_class"],
        states=tuple(StateTensor(**state) for state in data["states"]),
        created=data["created"],
        temporaries=temporaries,
        default_implementation=data.get("default_implementation", "foreach"),
        source=data["source"],
        checked=data["checked"],
        paged=data.get("paged", False),
        paged_min_numel=data.get("paged_min_numel", 0),
        defaults=data.get("defaults", {}),
        aliases=tuple(data.get("aliases", ())),
    )


# ---------------------------------------------------------------- shape rules
def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


_SHAPES: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "like_param": lambda shape, block: shape,
    "scalar": lambda shape, block: (),
    "rows": lambda shape, block: shape[:-1],
    "cols": lambda shape, block: (*shape[:-2], shape[-1]),
    "rows_kept": lambda shape, block: (*shape[:-1], 1),
    "cols_kept": lambda shape, block: (*shape[:-2], 1, shape[-1]),
    "blocks": lambda shape, block: (ceil_div(_numel(shape), block),),
    "packed": lambda shape, block: (ceil_div(_numel(shape), 2),),
    "book": lambda shape, block: (block,),
}


def state_tensors(
    profile: OptimizerProfile,
    shape: tuple[int, ...],
    dtype: str,
    params: Mapping[str, Any] | None = None,
    *,
    implementation: str = "foreach",
    quantized: bool = True,
) -> list[TensorSpec]:
    """State tensors of a parameter of `shape` and `dtype`. implementation decides where the step counters live;
    quantized=False: the form that small tensors have, for parameters kept in full precision (nn.Embedding under the HF Trainer)."""
    params = params or {}
    on_device = implementation == "fused" or bool(params.get("capturable"))
    numel = _numel(shape)
    tensors = []
    for state in profile.states:
        if state.when is not None and not profile.argument(state.when, params):
            continue
        if state.low_precision and dtype_bytes(dtype) > _LOW_PRECISION_BYTES:
            continue
        if len(shape) < state.min_ndim or (state.max_ndim is not None and len(shape) > state.max_ndim):
            continue
        if state.implementation is not None and state.implementation != implementation:
            continue
        if implementation in ("deepspeed_fused", "cpu") and state.device == "step":  # DeepSpeed's optimizers count steps in a Python int
            continue
        small = numel < state.min_numel or numel % state.block_multiple != 0 or (state.min_numel > 0 and not quantized)
        if small and state.small_dtype is None:
            continue
        tensors.append(_spec(profile, state, shape, dtype, small=small, on_device=on_device))
    return tensors


def _spec(profile: OptimizerProfile, state: StateTensor, shape: tuple[int, ...], dtype: str, *, small: bool, on_device: bool) -> TensorSpec:
    rule, kind = ("like_param", state.small_dtype) if small else (state.shape, state.dtype)
    own = _SHAPES[rule](shape, state.block_size)
    if state.repeat > 1:
        own = (state.repeat, *own)
    device = state.device
    if device == "step":
        device = "param" if on_device else "cpu"
    elif profile.paged and state.paged and _numel(shape) >= profile.paged_min_numel:
        device = "paged"
    return TensorSpec(state.name, own, dtype if kind in ("param", None) else str(kind), device)


def state_bytes(
    profile: OptimizerProfile,
    shape: tuple[int, ...],
    dtype: str,
    params: Mapping[str, Any] | None = None,
    *,
    implementation: str = "foreach",
    quantized: bool = True,
) -> list[tuple[str, int]]:
    """(state name, bytes) of every state tensor that is allocated on the parameter's device: one entry per allocation, before the
    allocator's rounding. Host counters and paged states are left out; `state_tensors` names them too."""
    tensors = state_tensors(profile, shape, dtype, params, implementation=implementation, quantized=quantized)
    return [(tensor.name, tensor.nbytes) for tensor in tensors if tensor.device == "param"]


def temporary_bytes(
    profile: OptimizerProfile,
    implementation: str,
    total_bytes: int,
    largest_bytes: int,
    params: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float32",
) -> int:
    """Bytes that one step() allocates beside parameters, gradients and states at its peak, for a group of total_bytes whose
    largest parameter has largest_bytes (both in the parameter's dtype). The previous parameter counts as large as the largest."""
    rules = profile.temporaries.get(implementation, ())
    low = dtype_bytes(dtype) <= _LOW_PRECISION_BYTES
    total = 0.0
    for rule in rules:
        if rule.when is not None and not profile.argument(rule.when, params or {}):
            continue
        largest = rule.largest_low_precision if low and rule.largest_low_precision is not None else rule.largest
        total += rule.copies * total_bytes + (largest + rule.previous) * largest_bytes
    return int(total)
