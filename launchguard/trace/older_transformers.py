"""What a job's transformers does otherwise in a step than the newer one that is installed here, where bytes differ.

Read in the wheels of 4.37.2, 4.44.2, 4.45.2, 4.48.1 and 4.49.0: models/llama/modeling_llama.py, loss/loss_utils.py:ForCausalLMLoss; of
4.48.1 to 4.57.6: integrations/sdpa_attention.py; of 4.53.3, 4.57.6 and 5.0.0: masking_utils.py:find_packed_sequence_indices.
"""

from __future__ import annotations

from typing import Any

import torch

from launchguard.installed import release

PADS_LABELS = (4, 49)  # labels are padded; before, the logits were shifted, which copies them
GROUPED_SDPA = (4, 54)  # SDPA is given grouped keys and values; before, repeat_kv made a copy of them for every query head
# without a cache and an attention mask, positions are searched for packed sequences, and a mask is made whether or not there are any
MASKS_PACKED = ((4, 53), (5, 0))


def imitate(stated: str, installed: str, sdpa: bool) -> None:
    """stated: the job's version; sdpa: attention is SDPA's, not flash-attn's traced as SDPA, which always took grouped heads. Changes the
    installed library for the rest of the worker's life; nothing when it is not newer."""
    if sdpa and release(stated) < GROUPED_SDPA <= release(installed):
        from transformers.integrations import sdpa_attention

        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    if sdpa and MASKS_PACKED[0] <= release(stated) < MASKS_PACKED[1] <= release(installed):
        from transformers import masking_utils

        masking_utils.find_packed_sequence_indices = _sequence_indices
    if release(stated) < PADS_LABELS <= release(installed):
        from transformers.loss import loss_utils

        loss_utils.LOSS_MAPPING["ForCausalLM"] = _shifted


def _sequence_indices(position_ids: torch.Tensor) -> torch.Tensor:
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _shifted(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> torch.Tensor:
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return fixed_cross_entropy(shifted, labels[..., 1:].contiguous().view(-1), num_items_in_batch, -100)
