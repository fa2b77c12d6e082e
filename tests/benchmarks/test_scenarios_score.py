"""The score of scenarios: what counts as right, what is counted apart. The scenarios themselves are run by tests/scenarios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import scenarios

CONFIG = """{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64,
"n_positions": 64}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A scenario outside the repository: one rank of a tiny model."""
    made = tmp_path / "X1"
    (made / "m").mkdir(parents=True)
    (made / "m" / "config.json").write_text(CONFIG)
    (made / "launchguard.yaml").write_text("{device: 8GiB, seq_len: 32}")
    (made / "command.txt").write_text(
        "# a comment\ntorchrun --nproc_per_node 2 \\\n  t.py --model m --output_dir o --per_device_train_batch_size 1\n"
    )
    return made


def _expect(folder: Path, text: str) -> scenarios.Score:
    (folder / "expect.yaml").write_text("source: https://example.org\n" + text)
    return scenarios.score(folder)


def test_right_and_wrong(folder: Path) -> None:
    assert _expect(folder, "kind: memory\nverdict: fits\nvalues: {world_size: 2}\n").right
    wrong = _expect(folder, "kind: memory\nverdict: exceeds\nphase: [save]\ndiagnostics: [LG252]\nrequested: 3 GiB\n")
    assert not wrong.right and dict(wrong.checks) == {"verdict": False, "phase": False, "diagnostic": False, "size": False}
    assert len(wrong.wrong) == 4


def test_an_error_is_an_answer(folder: Path) -> None:
    (folder / "command.txt").write_text("deepspeed --include localhost:0 --num_gpus 1 t.py")
    assert _expect(folder, "kind: config\nverdict: error\ndiagnostics: [LG250]\n").right


@pytest.mark.parametrize(
    "text", ["kind: other\nverdict: fits\n", "kind: memory\n", "kind: memory\nverdict: maybe\n", "kind: memory\nphases: save\n"]
)
def test_unusable_expectations_are_not_run(folder: Path, text: str) -> None:
    assert _expect(folder, text).not_run


def test_a_folder_without_a_command_is_not_run(folder: Path) -> None:
    (folder / "command.txt").unlink()
    found = _expect(folder, "kind: memory\nverdict: fits\n")
    assert found.not_run and not found.right
    report = scenarios.summary([found])
    assert report["not_run"] == {"X1": "there is no command.txt"} and report["kinds"]["memory"]["ran"] == 0


def test_written_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "expect.yaml").write_text("source: https://example.org\nkind: memory\nverdict: exceeds\n")
    assert scenarios.main([str(tmp_path), "--json", str(tmp_path / "out.json"), "--jobs", "1"]) == 0
    assert "wrong    X1: verdict: fits, not exceeds" in capsys.readouterr().out
    assert '"right": 0' in (tmp_path / "out.json").read_text()
