"""Which modules make one FSDP unit: the wrap policies of torch, Accelerate and PEFT, over a module tree. The strategies lay state out by
it; the tracer asks which frozen parameters share FSDP1's flat parameter with trainable ones.

Sources: torch 2.13 torch/distributed/fsdp/wrap.py (transformer_auto_wrap_policy, size_based_auto_wrap_policy),
accelerate 1.15 utils/fsdp_utils.py:fsdp2_prepare_model (embedding and tail in groups of their own), peft 0.21 utils/other.py:
fsdp_auto_wrap_policy, which the HF Trainer puts in place of the user's policy for a PeftModel under FSDP1 (transformers 5.24
distributed/fsdp.py:update_fsdp_plugin_peft).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launchguard.errors import InputError
from launchguard.events import StepTrace
from launchguard.job import TRAINER_LOOPS, FsdpSpec, JobSpec

NEVER_WRAPPED_BY_SIZE = ("ModuleList", "ModuleDict", "MultiheadAttention")
CHECKPOINT_WRAPPER = "CheckpointWrapper"


@dataclass(frozen=True)
class Unit:
    """One FSDP unit. modules: where its hooks sit (a group may have several); params: indexes, in module order;
    keep: not resharded after forward, whatever the setting."""

    name: str
    modules: tuple[int, ...]
    params: tuple[int, ...]
    is_root: bool = False
    keep: bool = False


def peft_policy(job: JobSpec) -> bool:
    """Whether the Trainer replaces the wrap policy by PEFT's: it does where the model is prepared before the optimizer is made, which FSDP2
    forbids (transformers 5.24 trainer.py:_prepare_for_training, delay_optimizer_creation)."""
    return job.lora is not None and job.loop in TRAINER_LOOPS and (job.fsdp is None or job.fsdp.version == 1)


def units_of(trace: StepTrace, fsdp: FsdpSpec, grouping: bool = False, peft: bool = False) -> list[Unit]:
    """Units bottom-up, the root last (with what no other unit took; without parameters it is left out unless it is the only one).
    grouping: Accelerate's FSDP2 grouping; peft: under PEFT's policy. Raises InputError when a wrap class is not in the model."""
    wrapped = _peft_modules(trace, fsdp) if peft else _wrapped_modules(trace, fsdp)
    groups: list[tuple[tuple[int, ...], bool]] = [((m,), False) for m in wrapped]
    if grouping:
        groups += _accelerate_groups(trace)
    owner = _owners(trace, groups)
    units = []
    for g, (modules, keep) in enumerate(groups):
        params = tuple(i for i in range(len(trace.params)) if owner[i] == g)
        if params:
            units.append(Unit(trace.modules[modules[0]].name, modules, params, keep=keep))
    rest = tuple(i for i in range(len(trace.params)) if owner[i] == -1)
    if rest or not units:
        units.append(Unit("", (0,), rest, is_root=True, keep=True))
    return units


def _wrapped_modules(trace: StepTrace, fsdp: FsdpSpec) -> list[int]:
    if fsdp.wrap_policy == "NO_WRAP":
        return []
    if fsdp.wrap_policy == "SIZE_BASED_WRAP":
        return _by_size(trace, fsdp.min_num_params)
    return _layers(trace, fsdp)


def _peft_modules(trace: StepTrace, fsdp: FsdpSpec) -> list[int]:
    """Layers, and on their own the leaf modules whose weight is trained, innermost first."""
    parents = {m.parent for m in trace.modules}
    own = {p.module for p in trace.params if p.requires_grad and p.name.rpartition(".")[2] == "weight"}
    last = list(range(len(trace.modules)))  # the last module below each; modules come in the order of a walk from the root
    for i in range(len(trace.modules) - 1, 0, -1):
        last[trace.modules[i].parent] = max(last[trace.modules[i].parent], last[i])
    return sorted({*_layers(trace, fsdp), *(own - parents)}, key=lambda i: (last[i], -i))


def _layers(trace: StepTrace, fsdp: FsdpSpec) -> list[int]:
    classes = set(fsdp.wrap_classes) or set(trace.facts.get("no_split_modules", ()))
    present = {m.cls for m in trace.modules}
    missing = set(fsdp.wrap_classes) - present
    # names: one missing is enough (accelerate 1.15 set_auto_wrap_policy, fsdp2_prepare_auto_wrap_policy); a script's own classes exist
    if missing and (fsdp.accelerate_grouping or not (set(fsdp.wrap_classes) & present)):
        counts = Counter(m.cls for m in trace.modules)
        repeated = sorted(cls for cls, n in counts.items() if n > 1)
        raise InputError(f"no module of class {', '.join(sorted(missing))} in {trace.facts.get('model_class', 'the model')}",
                         where="fsdp_transformer_layer_cls_to_wrap", help=f"classes that repeat in it: {', '.join(repeated)}",
                         code="LG231")  # fmt: skip
    chosen = [i for i, m in enumerate(trace.modules) if m.cls in classes]
    # a checkpoint wrapper stands in for the layer that it wraps: FSDP's hooks sit outside it
    return sorted(_outermost(trace, i) for i in chosen)


def _outermost(trace: StepTrace, module: int) -> int:
    parent = trace.modules[module].parent
    return parent if parent > 0 and trace.modules[parent].cls == CHECKPOINT_WRAPPER else module


def _by_size(trace: StepTrace, minimum: int) -> list[int]:
    """torch's recursive size policy: a module is wrapped when what is left unwrapped below it reaches the minimum."""
    children: list[list[int]] = [[] for _ in trace.modules]
    own = [0] * len(trace.modules)
    for i, m in enumerate(trace.modules):
        if m.parent >= 0:
            children[m.parent].append(i)
    for p in trace.params:
        own[p.module] += p.numel
    wrapped: list[int] = []

    def visit(i: int) -> tuple[int, int]:
        """(all parameters below, of which wrapped)."""
        total, done = own[i], 0
        for c in children[i]:
            t, w = visit(c)
            total, done = total + t, done + w
        if i and total - done >= minimum and trace.modules[i].cls not in NEVER_WRAPPED_BY_SIZE:
            wrapped.append(i)
            return total, total
        return total, done

    visit(0)
    return wrapped


def _accelerate_groups(trace: StepTrace) -> list[tuple[tuple[int, ...], bool]]:
    names = {m.name: i for i, m in enumerate(trace.modules)}
    embed = names.get(trace.facts.get("input_embedding") or "?")
    head = names.get(trace.facts.get("output_embedding") or "?")
    norm = _final_norm(trace)
    tied = bool(trace.facts.get("tied"))
    groups: list[tuple[tuple[int, ...], bool]] = []
    if embed is not None and not tied:
        groups.append(((embed,), False))
    tail = tuple(m for m in ((norm, embed, head) if tied else (norm, head)) if m is not None)
    if tail:
        groups.append((tail, True))
    return groups


def _final_norm(trace: StepTrace) -> int | None:
    """accelerate 1.15 fsdp_utils._find_final_norm: the base model's last direct child whose class name contains "Norm"."""
    prefix = trace.facts.get("base_model_prefix") or ""
    base = next((i for i, m in enumerate(trace.modules) if m.name == prefix), None)
    norms = [i for i, m in enumerate(trace.modules) if m.parent == base and "Norm" in m.cls]
    return norms[-1] if norms else None


def _owners(trace: StepTrace, groups: Sequence[tuple[tuple[int, ...], bool]]) -> list[int]:
    """For each parameter the innermost group that holds it, -1 for the root; a tied parameter belongs to the first group."""
    group_of = {m: g for g, (modules, _) in enumerate(groups) for m in modules}
    nearest: list[int] = []
    for i, m in enumerate(trace.modules):
        nearest.append(group_of.get(i, nearest[m.parent] if m.parent >= 0 else -1))
    owner: list[int] = []
    for p in trace.params:
        found = [nearest[m] for m in p.owners if nearest[m] >= 0]
        owner.append(found[0] if found else -1)
    return owner
