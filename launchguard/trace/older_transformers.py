"""What a job's transformers does otherwise in a step than the newer one that is installed here, where bytes differ.

Read in the wheels of 4.37.2, 4.44.2, 4.45.2, 4.48.1 and 4.49.0: models/llama/modeling_llama.py, loss/loss_utils.py:ForCausalLMLoss.
"""

from __future__ import annotations

from typing import Any

import torch

from launchguard.installed import release

PADS_LABELS = (4, 49)  # labels are padded; before, the logits were shifted, which copies them


def imitate(stated: str, installed: str) -> None:
    """stated: the job's version. Changes the installed library for the rest of the worker's life; nothing when it is not newer."""
    if release(stated) < PADS_LABELS <= release(installed):
        from transformers.loss import loss_utils

        loss_utils.LOSS_MAPPING["ForCausalLM"] = _shifted


def _shifted(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> torch.Tensor:
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return fixed_cross_entropy(shifted, labels[..., 1:].contiguous().view(-1), num_items_in_batch, -100)
