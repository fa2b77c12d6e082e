"""A tiny model, and a job resolved from a launch line in a temporary directory: no network, no GPU, deepspeed only where asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchguard import configs, launch
from launchguard.job import JobSpec
from launchguard.launch import _gpus

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


class Workdir:
    """A directory with a model `m`; files are written, launch lines resolved in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("m/config.json", LLAMA)

    def write(self, name: str, content: Any) -> str:
        """Write text, or a dict as JSON; gives the name back."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return name

    def resolve(self, line: str | list[str], options: dict[str, Any] | None = None, gpus: int | None = None, **env: str) -> JobSpec:
        """The job of a launch line. The installed DeepSpeed is left unasked unless the options say otherwise."""
        argv = line.split() if isinstance(line, str) else line
        environment = {"HOME": "/nonexistent", "HF_HUB_OFFLINE": "1", **env}
        spec = launch.parse(argv, environment, str(self.path), gpus)
        return configs.resolve(spec, {"validate": False, **(options or {})})


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workdir:
    monkeypatch.setattr(_gpus, "nvml_gpus", lambda: 0)
    return Workdir(tmp_path)


@pytest.fixture
def codes() -> Callable[[JobSpec], set[str]]:
    return lambda job: {note.code for note in job.notes}
