"""Where a script makes a state dict of the whole model by itself, beside what the Trainer or Accelerate write. Read from its syntax tree.

Rules of the libraries: torch 2.13 distributed/fsdp/api.py (FullStateDictConfig: on the device of every rank by default),
fully_sharded_data_parallel.py:state_dict_type, distributed/checkpoint/state_dict.py:StateDictOptions, tensor/_api.py:full_tensor;
peft 0.21 peft_model.py:save_pretrained and transformers 5.24 modeling_utils.py:save_pretrained call state_dict() unless they are given one;
deepspeed 0.19.8 zero/partition_parameters.py:GatheredParameters, utils/zero_to_fp32.py:get_fp32_state_dict_from_zero_checkpoint.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launchguard.configs._syntax import callee
from launchguard.job import Origin

DEVICE, RANK0, EVERY_HOST, SHARDED = "device", "rank 0", "every host", "sharded"
_MODEL = re.compile(r"model|module|\bnet\b|policy|actor|transformer|engine", re.IGNORECASE)
_NO_MODEL = re.compile(r"tokenizer|processor|optim|sched|config|loader|scaler|data|ema_", re.IGNORECASE)
_WRAPS = ("FSDP", "FullyShardedDataParallel", "fully_shard", "prepare", "train", "initialize", "fit")  # before these the model is plain
_CONFIGS = ("FullStateDictConfig", "StateDictOptions")
_FULL_CALLS = ("get_model_state_dict", "get_state_dict")
_OPTIMIZER_CALLS = ("optim_state_dict", "full_optim_state_dict", "get_optimizer_state_dict")


@dataclass(frozen=True)
class Gather:
    """A call that makes a whole model's state dict.

    kind: "state_dict" (FSDP1 gathers by its state_dict_type) | "full_tensor" (DTensors made whole) | "options" (torch's checkpoint API,
    either FSDP) | "accelerate" (get_state_dict, save_model) | "parameters" (ZeRO-3's GatheredParameters over all of them) | "16bit"
    (DeepSpeed's consolidated weights) | "fp32" (from a ZeRO checkpoint);
    where: "device" (of every rank) | "rank 0" (its host) | "every host" | "sharded"."""

    kind: str
    where: str
    origin: Origin
    scope: str = ""


def gathers_of(tree: ast.Module, name: str) -> tuple[tuple[Gather, ...], Origin | None]:
    """The whole-model state dicts of a script, in its order, and where it makes one of the optimizer. Calls in functions that nothing in
    the script names are left out, and those before the model is wrapped."""
    reader = _Reader(name)
    reader.visit(tree)
    lines = reader.wrap_lines
    found = [
        g
        for g in reader.found
        if (not g.scope or g.scope in reader.named) and not (g.scope in lines and int(g.origin.key) < min(lines[g.scope]))
    ]
    return tuple(found), reader.optimizer


class _Reader(ast.NodeVisitor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[Gather] = []
        self.optimizer: Origin | None = None
        self.named: set[str] = set()
        self.wrap_lines: dict[str, list[int]] = {}
        self._configs: dict[str, Mapping[str, bool]] = {}  # variable -> keywords of the configuration that it holds
        self._type: tuple[str, Mapping[str, bool]] = ("FULL_STATE_DICT", {})  # FSDP1's state_dict_type that holds here
        self._scope = ""
        self._in_class = False

    # ---------------------------------------------------------------- where we are
    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._in_class = self._in_class, True
        self.generic_visit(node)
        self._in_class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._scope
        if not self._in_class:  # a method may be called by the library
            self._scope = node.name
        self.generic_visit(node)
        self._scope = outer

    def visit_With(self, node: ast.With) -> None:
        outer = self._type
        for item in node.items:
            if isinstance(item.context_expr, ast.Call) and callee(item.context_expr.func)[0] == "state_dict_type":
                self._type = self._state_dict_type(item.context_expr)
        self.generic_visit(node)
        self._type = outer

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.named.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.named.add(node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.Call) and callee(node.value.func)[0] in _CONFIGS:
            for target in node.targets:
                self._configs[ast.unparse(target)] = _flags(node.value)
        self.generic_visit(node)

    # ---------------------------------------------------------------- calls
    def visit_Call(self, node: ast.Call) -> None:
        called = callee(node.func)[0]
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if called in _WRAPS:
            self.wrap_lines.setdefault(self._scope, []).append(node.lineno)
        if called == "set_state_dict_type":
            self._type = self._state_dict_type(node)
        elif called in ("cpu", "to") and isinstance(inner, ast.Call) and callee(inner.func)[0] == "full_tensor":
            self._add("full_tensor", RANK0, inner)
            return
        elif called in _OPTIMIZER_CALLS and self.optimizer is None:
            self.optimizer = self._origin(node)
        else:
            self._gather(called, node)
        self.generic_visit(node)

    def _gather(self, called: str, node: ast.Call) -> None:
        keywords = {keyword.arg for keyword in node.keywords}
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if called == "state_dict" and _is_model(node) or called == "save_pretrained" and _is_model(node) and "state_dict" not in keywords:
            kind, flags = self._type
            full = kind == "FULL_STATE_DICT"
            self._add("state_dict", _full_where(flags, "offload_to_cpu", "rank0_only") if full else SHARDED, node)
        elif called in ("get_state_dict", "save_model") and owner.endswith("accelerator"):
            self._add("accelerate", RANK0, node)
        elif called in _FULL_CALLS and any(self._flags_of(argument).get("full_state_dict") for argument in _arguments(node)):
            flags = next(f for f in map(self._flags_of, _arguments(node)) if f.get("full_state_dict"))
            self._add("options", RANK0 if flags.get("cpu_offload") else DEVICE, node)
        elif called == "full_tensor":
            self._add("full_tensor", DEVICE, node)
        elif called == "GatheredParameters" and node.args and _all_parameters(node.args[0]):
            self._add("parameters", DEVICE, node)
        elif called in ("_zero3_consolidated_16bit_state_dict", "save_16bit_model"):
            self._add("16bit", RANK0, node)
        elif called in ("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"):
            self._add("fp32", RANK0, node)

    def _state_dict_type(self, node: ast.Call) -> tuple[str, Mapping[str, bool]]:
        names = [a.attr for a in _arguments(node) if isinstance(a, ast.Attribute) and a.attr.endswith("_STATE_DICT")]
        flags = next((f for f in map(self._flags_of, _arguments(node)) if f), {})
        return (names[0] if names else "FULL_STATE_DICT"), flags

    def _flags_of(self, argument: ast.expr) -> Mapping[str, bool]:
        if isinstance(argument, ast.Call) and callee(argument.func)[0] in _CONFIGS:
            return _flags(argument)
        return self._configs.get(ast.unparse(argument), {})

    def _add(self, kind: str, where: str, node: ast.Call) -> None:
        self.found.append(Gather(kind, where, self._origin(node), self._scope))

    def _origin(self, node: ast.AST) -> Origin:
        return Origin(self.name, str(getattr(node, "lineno", 0)))


def _full_where(flags: Mapping[str, bool], offload: str, rank0: str) -> str:
    if not flags.get(offload):
        return DEVICE
    return RANK0 if flags.get(rank0) else EVERY_HOST


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _flags(node: ast.Call) -> dict[str, bool]:
    """Keywords that are True or False; one that is neither is taken as set, so that a gather is not invented."""
    return {k.arg: bool(k.value.value) if isinstance(k.value, ast.Constant) else True for k in node.keywords if k.arg}


def _is_model(node: ast.Call) -> bool:
    """Does model.state_dict(), trainer.model.save_pretrained(...), accelerator.unwrap_model(model).state_dict() belong to the model?"""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(owner, ast.Call):
        owner = owner.func
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return bool(_MODEL.search(name)) and not _NO_MODEL.search(name)


def _all_parameters(argument: ast.expr) -> bool:
    """model.parameters(), list(model.parameters()), but not module.parameters(recurse=False), nor a name for some of them."""
    if isinstance(argument, ast.Call) and callee(argument.func)[0] == "list" and argument.args:
        argument = argument.args[0]
    return isinstance(argument, ast.Call) and callee(argument.func)[0] == "parameters" and not argument.keywords and _is_model(argument)
