"""Whether a Trainer's job evaluates, and what it keeps of it."""

from __future__ import annotations

from typing import Any

import pytest

from launchguard.errors import InputError
from launchguard.job import EvaluationSpec

BASE = "python train.py --model_name_or_path m --output_dir out --max_length 64"
SCRIPT = """
from transformers import Trainer, TrainingArguments, HfArgumentParser
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=model, args=args, train_dataset=a, eval_dataset=b{extra})
trainer.train()
"""


def evaluation(work: Any, flags: str, script: str = "") -> EvaluationSpec | None:
    work.write("train.py", script)
    return work.resolve(f"{BASE} {flags}").evaluation


def test_none_without_a_strategy(work: Any) -> None:
    assert evaluation(work, "") is None
    assert evaluation(work, "--eval_strategy no --per_device_eval_batch_size 4") is None
    assert evaluation(work, "--do_eval", SCRIPT.format(extra="")) is None  # the Trainer itself does nothing with do_eval


def test_default_batch_is_eight_whatever_the_training_batch(work: Any) -> None:
    found = evaluation(work, "--eval_strategy epoch --per_device_train_batch_size 1", SCRIPT.format(extra=""))
    assert found == EvaluationSpec(batch_size=8, loss_only=True)


def test_after_training(work: Any) -> None:
    found = evaluation(work, "--do_eval --per_device_eval_batch_size 2", SCRIPT.format(extra="") + "\ntrainer.evaluate()\n")
    assert found is not None and found.batch_size == 2


def test_the_default_that_keeps_everything_is_named(work: Any) -> None:
    work.write("train.py", SCRIPT.format(extra=", compute_metrics=f"))
    job = work.resolve(f"{BASE} --eval_strategy steps")
    assert job.origin("evaluation.accumulation_steps").source.startswith("default of transformers")


@pytest.mark.parametrize(
    ("extra", "flags", "expected"),
    [
        (", compute_metrics=f", "", (False, False)),
        (", compute_metrics=None", "", (True, False)),
        (", compute_metrics=f", "--prediction_loss_only", (True, False)),
        (", compute_metrics=f if args.do_eval else None, preprocess_logits_for_metrics=g", "", (False, True)),
    ],
)
def test_what_is_kept(work: Any, extra: str, flags: str, expected: tuple[bool, bool]) -> None:
    found = evaluation(work, f"--eval_strategy steps --eval_steps 10 {flags}", SCRIPT.format(extra=extra))
    assert found is not None and (found.loss_only, found.reduced) == expected


def test_unknown_metrics_are_said(work: Any, codes: Any) -> None:
    work.write("train.py", "")
    job = work.resolve(f"{BASE} --eval_strategy steps")
    assert job.evaluation is not None and job.evaluation.loss_only and "LG217" in codes(job)


def test_size_of_the_set(work: Any) -> None:
    flags = "--eval_strategy steps --per_device_eval_batch_size 4 --max_eval_samples 100 --eval_accumulation_steps 3 --batch_eval_metrics"
    work.write("train.py", SCRIPT.format(extra=", compute_metrics=f"))
    job = work.resolve(f"torchrun --nproc_per_node 2 {BASE.removeprefix('python ')} {flags}")
    assert job.evaluation == EvaluationSpec(4, loss_only=False, accumulation_steps=3, per_batch=True, batches=13)
    assert str(job.origin("evaluation.accumulation_steps")) == "command line:--eval_accumulation_steps"


def test_impossible_batch(work: Any) -> None:
    with pytest.raises(InputError, match="not a positive number"):
        evaluation(work, "--eval_strategy steps --per_device_eval_batch_size 0")
