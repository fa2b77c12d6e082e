"""The callback in a real Trainer on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from launchguard.integrations.trainer_callback import LaunchguardCallback, WouldExceed


def train(tmp_path: Path, callback: LaunchguardCallback, **arguments: Any) -> Trainer:
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    rows = [{"input_ids": torch.zeros(16, dtype=torch.long), "labels": torch.zeros(16, dtype=torch.long)} for _ in range(4)]
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
    }
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=TrainingArguments(**{**settings, **arguments}), train_dataset=rows, callbacks=[callback]
    )
    trainer.train()
    return trainer


def test_a_run_that_fits_trains(tmp_path: Path) -> None:
    callback = LaunchguardCallback(seq_len=16, device="24GiB")
    assert train(tmp_path, callback).state.global_step == 1
    assert callback.outcome is not None and callback.outcome.verdict.verdict == "fits"
    assert callback.outcome.verdict.job.micro_batch_size == 2


def test_a_run_that_does_not_fit_is_refused_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(WouldExceed, match="LG101"):
        train(tmp_path, LaunchguardCallback(seq_len=16, device="1GiB", headroom="70%"))


def test_a_warning_does_not_stop_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train(tmp_path, LaunchguardCallback(seq_len=16, device="1GiB", headroom="70%", on_exceed="warn"))
    assert trainer.state.global_step == 1
    assert "LG101" in capsys.readouterr().out


def test_a_guard_that_cannot_tell_lets_it_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, LaunchguardCallback(seq_len=16, device="auto")).state.global_step == 1
    assert "cannot tell" in capsys.readouterr().out
