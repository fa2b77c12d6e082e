"""The optimizer tables against the real classes: state names, shapes, dtypes, and what step() allocates."""

from __future__ import annotations

import importlib
import inspect
import weakref
from typing import Any

import pytest

from launchguard.errors import InputError
from launchguard.profiles import OptimizerProfile, optimizer, optimizers, state_bytes, state_tensors, temporary_bytes

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

CHECKED = [profile for profile in optimizers() if profile.checked]
SHAPES = [(33, 7), (5, 33, 7), (7,)]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "adam": [{"amsgrad": True}],
    "adamw": [{"amsgrad": True}],
    "sgd": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "rmsprop": [{"momentum": 0.9}, {"centered": True}],
    "adafactor": [{"beta1": 0.9}],
}


def real_class(profile: OptimizerProfile) -> Any:
    module, _, name = profile.torch_class.rpartition(".")
    return getattr(pytest.importorskip(module), name, None) or pytest.skip(f"{profile.torch_class} is not installed")


def make(profile: OptimizerProfile, params: list[Any], arguments: dict[str, Any]) -> Any:
    cls = real_class(profile)
    fixed = {"scale_parameter": False, "relative_step": False} if profile.name == "adafactor" else {}
    return cls(params, lr=0.01, **fixed, **arguments)


def cases() -> list[Any]:
    return [
        pytest.param(profile, arguments, id=f"{profile.name}-{'-'.join(arguments) or 'default'}")
        for profile in CHECKED
        for arguments in [{}, *ARGUMENTS.get(profile.name, [])]
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("profile", "arguments"), cases())
def test_state_of_the_real_class(profile: OptimizerProfile, arguments: dict[str, Any], shape: tuple[int, ...], dtype: str) -> None:
    if profile.name == "muon" and len(shape) != 2:
        pytest.skip("torch's Muon takes matrices only")
    param = torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
    real = make(profile, [param], arguments)
    assert bool(real.state.get(param)) == (profile.created == "construction")
    param.grad = torch.ones_like(param)
    real.step()
    state = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in real.state[param].items()
        if isinstance(tensor, torch.Tensor)
    }
    assert {spec.name: (spec.shape, spec.dtype) for spec in state_tensors(profile, shape, dtype, arguments)} == state


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that ops inside the mode make, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage(), before)
        return out

    def _enter(self, storage: Any, before: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in before or key in self.known:
            return
        self.known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key, nbytes)

    def _leave(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes


@pytest.mark.parametrize("implementation", ["foreach", "for_loop"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("profile", [p for p in CHECKED if p.torch_class.startswith("torch.") and p.name != "muon"], ids=lambda p: p.name)
def test_temporaries_of_the_real_step(profile: OptimizerProfile, weight_decay: float, implementation: str) -> None:
    """Peak of a steady step over eight equal matrices, in copies of all parameters (foreach) or of one (for loop)."""
    arguments: dict[str, Any] = {"foreach": implementation == "foreach"}
    if "weight_decay" in inspect.signature(real_class(profile)).parameters:
        arguments["weight_decay"] = weight_decay
    params = [torch.nn.Parameter(torch.zeros(128, 128)) for _ in range(8)]
    real = make(profile, params, arguments)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(7):  # RAdam rectifies only from the sixth step on
        real.step()
    with LiveBytes() as measured:
        real.step()
    one = params[0].numel() * 4
    predicted = temporary_bytes(profile, implementation, 8 * one, one, arguments)
    assert measured.peak == pytest.approx(predicted, rel=0.06, abs=8192), f"{measured.peak / one:.2f} parameters"


def test_step_counters_live_where_the_implementation_wants_them() -> None:
    adamw, shape = optimizer("adamw"), (64, 64)
    names = {
        how: [name for name, _ in state_bytes(adamw, shape, "float32", implementation=how)]
        for how in ("foreach", "fused", "deepspeed_fused")
    }
    assert names == {
        "foreach": ["exp_avg", "exp_avg_sq"], "fused": ["step", "exp_avg", "exp_avg_sq"], "deepspeed_fused": ["exp_avg", "exp_avg_sq"]
    }  # fmt: skip
    assert dict(state_bytes(adamw, shape, "float32", {"capturable": True}))["step"] == 4
    assert dict(state_bytes(adamw, shape, "bfloat16"))["exp_avg"] == 64 * 64 * 2


def test_eight_bit_states() -> None:
    """2.03125 bytes per element; small tensors and those kept in full precision 8."""
    profile = optimizer("adamw_bnb_8bit")
    assert sum(n for _, n in state_bytes(profile, (4096, 256), "bfloat16")) == int(2.03125 * 4096 * 256)
    assert sum(n for _, n in state_bytes(profile, (4095,), "bfloat16")) == 8 * 4095
    assert sum(n for _, n in state_bytes(profile, (4096, 256), "bfloat16", quantized=False)) == 8 * 4096 * 256
    assert sum(n for _, n in state_bytes(optimizer("lion_8bit"), (4096, 256), "float32")) == int(1.015625 * 4096 * 256)
    assert sum(n for _, n in state_bytes(optimizer("ademamix_8bit"), (4096, 256), "float32")) == int(3.046875 * 4096 * 256)


def test_paged_states_are_not_the_allocators() -> None:
    profile = optimizer("paged_adamw_8bit")
    assert state_bytes(profile, (1024, 1024), "float32") == [("absmax1", 16384), ("absmax2", 16384)]
    assert [n for _, n in state_bytes(optimizer("paged_adamw_32bit"), (1024, 1024), "float32")] == []
    assert [n for _, n in state_bytes(optimizer("paged_adamw_32bit"), (1000,), "float32")] == [4000, 4000]
    assert {spec.device for spec in state_tensors(optimizer("paged_lion_32bit"), (1024, 1024), "float32")} == {"paged"}


def test_four_bit_states() -> None:
    sizes = dict(state_bytes(optimizer("adamw_torch_4bit"), (1024, 1024), "bfloat16"))
    assert (sizes["exp_avg"], sizes["exp_avg_scale"]) == (1024 * 512, 1024 * 1024 // 128 * 4)
    assert dict(state_bytes(optimizer("adamw_torch_4bit"), (100,), "bfloat16")) == {"exp_avg": 200, "exp_avg_sq": 200}


def test_low_precision_temporaries() -> None:
    adafactor = optimizer("adafactor")
    assert temporary_bytes(adafactor, "for_loop", 0, 1000, dtype="float32") == 2250
    assert temporary_bytes(adafactor, "for_loop", 0, 500, dtype="bfloat16") == 4250
    assert temporary_bytes(optimizer("adamw"), "fused", 10**9, 10**6) == 0


def test_names_of_the_trainer_are_known() -> None:
    """Every OptimizerNames value is a profile, or one of those that need a package nobody could read here."""
    training_args = pytest.importorskip("transformers.training_args")
    unmodelled = {"adalomo", "grokadamw", "stable_adamw"}
    prefixes = ("galore_", "apollo_", "schedule_free_")
    for name in (member.value for member in training_args.OptimizerNames):
        if name not in unmodelled and not name.startswith(prefixes):
            assert optimizer(name)


def test_aliases_are_unique() -> None:
    names = [name for profile in optimizers() for name in (profile.name, *profile.aliases)]
    assert len(names) == len(set(names))
    assert all(optimizer(name.upper()) is optimizer(name) for name in names)


def test_unknown() -> None:
    with pytest.raises(InputError, match="unknown optimizer 'adanw'; nearest: .*adamw"):
        optimizer("adanw")


def test_loading_needs_no_torch() -> None:
    module = importlib.import_module("launchguard.profiles.optimizer_profile")
    assert "torch" not in vars(module)
