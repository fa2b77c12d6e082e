"""Fixtures that every room shares: small model configs, a cache of one's own, no colour."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchguard.job import JobSpec, LaunchSpec, ModelSpec

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 515, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No colour, no options from outside, and traces cached for the session only."""
    for name in ("LAUNCHGUARD_DEVICE", "LAUNCHGUARD_HEADROOM", "LAUNCHGUARD_MODEL", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LAUNCHGUARD_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "traces"))


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., Path]:
    """Write a config.json (tiny Llama, with overrides) and return its folder."""

    def make(name: str = "model", **overrides: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **overrides}))
        return folder

    return make


@pytest.fixture
def make_job() -> Callable[..., JobSpec]:
    """A job on the tiny Llama; keyword arguments are JobSpec fields, `ranks` the world size, `config` overrides of the model."""

    def make(ranks: int = 1, config: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
        model = ModelSpec(source="tiny", config={**TINY_LLAMA, **(config or {})}, use_cache=False)
        launch = LaunchSpec("torchrun", ("torchrun", "train.py"), ".", "train.py", nproc_per_node=ranks)
        return JobSpec(**{"launch": launch, "model": model, "micro_batch_size": 2, "seq_len": 64, "device": "24GiB", **fields})

    return make
