"""profiles/optimizers against the real classes: state bytes, when they are made, and what step() holds beside them.

The classes and arguments are the libraries' own choice: transformers' handler for every OptimizerNames entry, DeepSpeed's engine names
for a JSON's. Libraries that are not installed are skipped (`pip install launchguard[conformance]` brings those that install without a
GPU); `checked: false` in a profile says that no test here compares it. On the CPU bitsandbytes and torchao run fallbacks in place of
their kernels, so only their states are compared. bitsandbytes' code books (1 KiB each, one pair an optimizer, not one a parameter) are
left out of its states.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from launchguard.configs import deepspeed_installed
from launchguard.configs.training_args import OPTIMIZERS
from launchguard.errors import InputError
from launchguard.profiles import OptimizerProfile, optimizer, optimizers, state_tensors, temporary_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from live_bytes import Live  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402

LIMIT = "states 0 B, step 6 % + 8 KiB"
NAMES = [member.value for member in OptimizerNames]

SHAPES = [(256, 160), (33, 64), (5, 33, 7), (5000,), (7,)]
DTYPES = ["float32", "bfloat16"]
PROJECTED = ("galore_", "apollo_")  # states of the targets' low-rank projections: their profile is full AdamW states, an upper bound
INSIDE_BACKWARD = ("lomo", "adalomo")  # no step of their own


# ------------------------------------------------------------------------------------------------ the real side
def made_by_transformers(name: str, params: Sequence[Any], arguments: Mapping[str, Any] | None = None) -> Any:
    """The optimizer that the Trainer makes of --optim NAME; skips when its library is not installed."""
    args = transformers.TrainingArguments(output_dir="unused", optim=name, use_cpu=True, report_to=[])
    try:
        cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(2, 2))
    except (ImportError, ValueError) as e:
        pytest.skip(f"{name}: {str(e).splitlines()[0]}")
    if kwargs.get("fused") and not torch.cuda.is_available():
        kwargs["fused"] = True  # torch 2.13 fuses on the CPU, too
    return cls(params, **{**kwargs, **(arguments or {})})


def parameters(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[Any]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape in shapes]


def step(real: Any, params: Sequence[Any]) -> None:
    getattr(real, "train", lambda: None)()  # schedulefree wants to be told
    for param in params:
        param.grad = torch.ones_like(param)
    real.step()


def state_of(real: Any, param: Any) -> dict[str, Any]:
    """A parameter's state; GrokAdamW keeps its own in the group."""
    return real.state.get(param) or next((g["state"].get(param, {}) for g in real.param_groups if "state" in g), {})


def pieces(value: Any) -> list[Any]:
    """The plain tensors of a tensor, quantised ones (torchao's subclasses) taken apart."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value] if isinstance(value, torch.Tensor) else []
    return [piece for name in value.__tensor_flatten__()[0] for piece in pieces(getattr(value, name))]


def real_bytes(real: Any, param: Any) -> int:
    held = [(name, piece) for name, value in state_of(real, param).items() for piece in pieces(value)]
    return sum(p.untyped_storage().nbytes() for name, p in held if not name.startswith("qmap"))


# ------------------------------------------------------------------------------------------------ states
def predicted_bytes(profile: OptimizerProfile, shape: tuple[int, ...], dtype: str, how: str, arguments: Mapping[str, Any]) -> int:
    return sum(spec.nbytes for spec in state_tensors(profile, shape, dtype, arguments, implementation=how))


def check_states(label: str, profile: OptimizerProfile, how: str, real: Any, params: Sequence[Any], residuals: list[Any]) -> None:
    """No difference in bytes, parameter by parameter, and states made when the profile says."""
    if how != "cpu":
        assert any(bool(state_of(real, p)) for p in params) == (profile.created == "construction"), "made at construction"
    step(real, params)
    arguments = {k: v for k, v in real.defaults.items() if v}
    wrong = []
    for param in params:
        shape, dtype = tuple(param.shape), str(param.dtype).removeprefix("torch.")
        ours, theirs = predicted_bytes(profile, shape, dtype, how, arguments), real_bytes(real, param)
        residuals.append((f"optimizer {label}", f"{'x'.join(map(str, shape))} {dtype}", "state", ours, theirs))
        if ours != theirs:
            wrong.append(f"{shape} {dtype}: predicted {ours}, real {theirs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(PROJECTED) and n not in INSIDE_BACKWARD])
def test_states_of_the_trainers_optimizers(name: str, dtype: str, residuals: list[Any]) -> None:
    params = parameters(SHAPES, dtype)
    key, how = OPTIMIZERS.get(name, (name, "for_loop"))
    check_states(name, optimizer(key), how, made_by_transformers(name, params), params, residuals)


CHECKED = [p for p in optimizers() if p.checked and not p.torch_class.startswith("deepspeed")]  # those are below
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "adam": [{"amsgrad": True}],
    "adamw": [{"amsgrad": True}],
    "sgd": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "rmsprop": [{"momentum": 0.9}, {"centered": True}],
    "adafactor": [{"beta1": 0.9}],
}
FIXED: dict[str, dict[str, Any]] = {  # as the Trainer makes them
    "adafactor": {"scale_parameter": False, "relative_step": False},
    "adamw_torch_4bit": {"block_size": 256},
}


def real_class(profile: OptimizerProfile) -> Any:
    module, _, name = profile.torch_class.rpartition(".")
    return getattr(pytest.importorskip(module), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("profile", "arguments"),
    [pytest.param(p, a, id=f"{p.name}-{'-'.join(a) or 'default'}") for p in CHECKED for a in [{}, *ARGUMENTS.get(p.name, [])]],
)
def test_states_of_the_class(profile: OptimizerProfile, arguments: dict[str, Any], dtype: str, residuals: list[Any]) -> None:
    shapes = [s for s in SHAPES if len(s) == 2 or profile.name != "muon"]  # torch's Muon takes matrices only
    params = parameters(shapes, dtype)
    real = real_class(profile)(params, lr=0.01, **FIXED.get(profile.name, {}), **arguments)
    check_states(f"{profile.torch_class} {' '.join(arguments)}".strip(), profile, "for_loop", real, params, residuals)


def test_states_of_adalomo(monkeypatch: pytest.MonkeyPatch, residuals: list[Any]) -> None:
    """Made at construction, on the current CUDA device."""
    lomo = pytest.importorskip("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t, *a, **k: t)
    model = torch.nn.ParameterDict({str(k): torch.nn.Parameter(torch.zeros(s)) for k, s in enumerate(s for s in SHAPES if len(s) < 3)})
    real = lomo.AdaLomo(model)
    for name, param in model.items():
        states = [s[name] for s in (real.exp_avg_sq, real.exp_avg_sq_row, real.exp_avg_sq_col) if name in s]
        ours = predicted_bytes(optimizer("adalomo"), tuple(param.shape), "float32", "for_loop", {})
        theirs = sum(t.untyped_storage().nbytes() for t in states)
        residuals.append(("optimizer adalomo", "x".join(map(str, param.shape)), "state", ours, theirs))
        assert ours == theirs
    assert optimizer("adalomo").created == "construction"


# ------------------------------------------------------------------------------------------------ DeepSpeed's
def deepspeed_classes() -> dict[tuple[str, str], Any]:
    """(name in the JSON, implementation) -> class, as runtime/engine.py:_configure_basic_optimizer chooses (deepspeed 0.19.8)."""
    pytest.importorskip("deepspeed")
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    return {
        ("Adam", "gpu"): FusedAdam, ("AdamW", "gpu"): FusedAdam, ("Lamb", "gpu"): FusedLamb, ("Lion", "gpu"): FusedLion,
        ("Adagrad", "gpu"): torch.optim.Adagrad, ("AdamW", "torch"): torch.optim.AdamW, ("Adam", "cpu"): DeepSpeedCPUAdam,
        ("AdamW", "cpu"): DeepSpeedCPUAdam, ("Adagrad", "cpu"): DeepSpeedCPUAdagrad, ("Lion", "cpu"): DeepSpeedCPULion,
    }  # fmt: skip


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's C++ ops update in place and allocate nothing; they need a compiler."""
    pytest.importorskip("deepspeed")
    import deepspeed.ops.adam.multi_tensor_apply as multi_tensor
    import deepspeed.ops.op_builder as builders

    stub = type("Stub", (), {"__getattr__": lambda s, k: lambda *a, **kw: None})
    for name in ("CPUAdamBuilder", "FusedAdamBuilder", "FusedLambBuilder", "FusedLionBuilder", "CPULionBuilder", "CPUAdagradBuilder"):
        monkeypatch.setattr(getattr(builders, name), "load", lambda self, verbose=True: stub())
    monkeypatch.setattr(multi_tensor.MultiTensorApply, "__call__", lambda self, *a, **k: None)


DEEPSPEED = [("Adam", "gpu"), ("AdamW", "gpu"), ("Lamb", "gpu"), ("Lion", "gpu"), ("Adagrad", "gpu"), ("AdamW", "torch"),
             ("Adam", "cpu"), ("AdamW", "cpu"), ("Adagrad", "cpu"), ("Lion", "cpu")]  # fmt: skip


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("name", "where"), DEEPSPEED, ids=lambda x: x)
def test_states_of_deepspeeds_optimizers(name: str, where: str, residuals: list[Any]) -> None:
    """Over float32 partitions, as ZeRO hands them."""
    key, how = deepspeed_installed.optimizer(name, {"torch_adam": where == "torch"})
    params = parameters(SHAPES, "float32")
    real = deepspeed_classes()[(name, where)](params, lr=0.01)
    check_states(f"deepspeed {name} {where}", optimizer(key), "cpu" if where == "cpu" else how, real, params, residuals)


def test_every_deepspeed_name_is_known() -> None:
    """mup's optimizers are subclasses of torch's; they are looked up by those names."""
    config = pytest.importorskip("deepspeed.runtime.config")
    for name in config.DEEPSPEED_OPTIMIZERS:
        assert optimizer(deepspeed_installed.optimizer(name, {})[0])


# ------------------------------------------------------------------------------------------------ step temporaries
def torch_cases() -> list[Any]:
    chosen = [
        p for p in optimizers() if p.checked and p.torch_class.startswith(("torch.optim", "schedulefree", "optimi")) and p.name != "muon"
    ]
    return [pytest.param(p, how, decay, id=f"{p.name}-{how}-{decay}") for p in chosen for how in p.temporaries for decay in (0.0, 0.1)
            if how in ("foreach", "for_loop", "fused")]  # fmt: skip


@pytest.mark.parametrize(("profile", "how", "decay"), torch_cases())
def test_temporaries_of_the_real_step(profile: OptimizerProfile, how: str, decay: float, residuals: list[Any]) -> None:
    """Peak of a steady step over eight equal matrices: within 6 % of one parameter for scalars and per-step lists."""
    cls = real_class(profile)
    known = inspect.signature(cls).parameters
    if how == "fused" and "fused" not in known:
        pytest.skip(f"{cls.__name__} has no fused step")
    arguments: dict[str, Any] = {k: how == k for k in ("foreach", "fused") if k in known}
    arguments |= {"weight_decay": decay} if "weight_decay" in known else {}
    params = parameters([(128, 128)] * 8, "float32")
    real = cls(params, lr=0.01, **arguments)
    for _ in range(7):  # RAdam rectifies only from the sixth step on
        step(real, params)
    for param in params:
        param.grad = torch.ones_like(param)
    with Live() as measured:
        real.step()
    one = params[0].numel() * 4
    ours = temporary_bytes(profile, how, 8 * one, one, arguments)
    residuals.append((f"optimizer {profile.name} {how}", f"decay {decay}", "step", ours, measured.peak))
    assert measured.peak == pytest.approx(ours, rel=0.06, abs=8192), f"{measured.peak / one:.2f} parameters"


# ------------------------------------------------------------------------------------------------ names
def test_names_of_the_trainer_are_known() -> None:
    for name in NAMES:
        key = OPTIMIZERS.get(name, (name, ""))[0]
        try:
            optimizer(key)
        except InputError:
            pytest.fail(f"--optim {name} has no profile")


def test_unchecked_profiles_are_those_of_libraries_that_do_not_install() -> None:
    unchecked = {p.name for p in optimizers() if not p.checked}
    assert unchecked == {"adamw_anyprecision", "galore_adamw", "lomo", "adalomo"}
