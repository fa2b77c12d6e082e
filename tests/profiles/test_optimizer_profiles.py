"""The optimizer tables: lookups, and the rules that a table states. The real classes are in tests/conformance/test_optimizers.py."""

from __future__ import annotations

import importlib

import pytest

from launchguard.errors import InputError
from launchguard.profiles import optimizer, optimizers, state_bytes, state_tensors, temporary_bytes


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
    assert (sizes["exp_avg"], sizes["exp_avg_scale"], sizes["exp_avg_qmap"]) == (1024 * 512, 1024 * 1024 // 256 * 4, 64)
    assert dict(state_bytes(optimizer("adamw_torch_4bit"), (100,), "bfloat16")) == {"exp_avg": 200, "exp_avg_sq": 200}


def test_low_precision_temporaries() -> None:
    adafactor = optimizer("adafactor")
    assert temporary_bytes(adafactor, "for_loop", 0, 1000, dtype="float32") == 2250
    assert temporary_bytes(adafactor, "for_loop", 0, 500, dtype="bfloat16") == 4250
    assert temporary_bytes(optimizer("adamw"), "fused", 10**9, 10**6) == 0


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
