"""Liger's kernels: the installed package's own Python runs, and its Triton kernels, which allocate nothing, are not launched.

What is put in its way: a package by the name of triton (none is needed, and kernels could not run on fake tensors), and the simulated
device where its source says "cuda". Read in liger_kernel 0.8.5: utils.py:infer_device, ops/rms_norm.py, ops/layer_norm.py (bytes that
depend on the card's SMs), ops/fused_linear_cross_entropy.py, transformers/monkey_patch.py:_apply_liger_kernel_to_instance, which
transformers 5.24 integrations/liger.py:apply_liger_kernel calls.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from launchguard.errors import Unpredictable
from launchguard.trace.cuda_semantics import DEVICE, Card

PACKAGE = "liger_kernel"


def apply(model: torch.nn.Module, config: dict[str, Any], card: Card) -> None:
    """Replace layers, and the loss, of a transformers model as the Trainer does. config: TrainingArguments.liger_kernel_config.
    Raises Unpredictable where the installed package cannot be used."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return  # the Trainer warns and goes on (integrations/liger.py)
    _install(card)
    try:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, **config)
    except Exception as e:  # a version of the package that does not know this transformers
        raise Unpredictable(f"Liger's kernels cannot be applied: {type(e).__name__}: {e}", where="use_liger_kernel",
                            help="check that liger-kernel and transformers fit together, or leave use_liger_kernel off") from e  # fmt: skip


@functools.cache
def _install(card: Card) -> None:
    """For the rest of the worker's life: the package imports parts of itself, and asks about the card, while it runs."""
    major, minor = card.compute_capability
    properties = types.SimpleNamespace(multi_processor_count=card.sms, major=major, minor=minor)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: card.compute_capability
    for name in [k for k in sys.modules if k.split(".")[0] == "triton"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """triton and all under it; Liger's own modules through _Loader."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.split(".")[0]
        if top == "triton":
            return importlib.machinery.ModuleSpec(name, _Triton(), is_package=True)
        if top != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Source in which the simulated device is the one that Liger asks for. No bytecode is cached: it would be taken on a GPU."""

    def get_code(self, fullname: str) -> types.CodeType:
        tree = _ForTheDevice().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _ForTheDevice(ast.NodeTransformer):
    """The word "cuda" becomes the simulated device's name, infer_device() returns it, and CUDA is available."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(DEVICE), node) if node.value == "cuda" else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name == "infer_device":
            node.body = [ast.Return(ast.Constant(DEVICE))]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "torch.cuda.is_available":
            return ast.copy_location(ast.Constant(True), node)
        return node


class _Kernel:
    """What triton.jit makes of a function: launching it does nothing, whatever the grid. Stands for any other name of triton, too, such
    as tl.constexpr(1.0), whose value host code reads."""

    def __init__(self, value: Any = None, *args: Any, **kwargs: Any) -> None:
        self.value = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Kernel(*args[:1])

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class _Module(types.ModuleType):
    """Any name is there: types and functions that only kernels use."""

    __version__ = "3.0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel()


class _Triton(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":
            vars(module).update(jit=_Kernel, cdiv=lambda x, y: math.ceil(x / y), next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length())
