"""Tokens that a job generates itself: predict_with_generate of an evaluation, rollouts of TRL's online trainers, and the engine beside.

Read in transformers 5.24 trainer_seq2seq.py:prediction_step (FSDP1 is whole meanwhile: summon_full_params) and cache_utils.py (keys and
values grow by torch.cat); trl 1.16 trainer/grpo_config.py, models/utils.py:unwrap_model_for_generation (ZeRO-3: GatheredParameters over all
parameters, unless ds3_gather_for_generation is off), generation/vllm_generation.py (sync_weights hands over one tensor at a time; in
colocate mode vLLM takes a share of the card).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchguard.configs._sources import Sources, positive
from launchguard.job import GenerationSpec, Origin, Setting
from launchguard.units import dtype_bytes

ONLINE = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "PPOTrainer")  # of TRL's trainers, those that generate while they train
NEW_TOKENS, PROMPT_TOKENS = 512, 512  # max_completion_length of GRPOConfig (1.16); prompts are not cut, so theirs is an assumption
VLLM_SHARE = 0.3  # vllm_gpu_memory_utilization of GRPOConfig (1.16)


def apply(sources: Sources) -> None:
    """Put generation of a job that generates; the strategy must be settled. For rollouts seq_len becomes prompt and completion."""
    online = next((name for name in ONLINE if name in sources.source.used), None)
    if online is not None:
        _rollout(sources, sources.source.used[online])
    elif sources.args.get("predict_with_generate") and "evaluation.batch_size" in sources.settings:
        _evaluation(sources)


def apply_reference(sources: Sources) -> None:
    """The reference model of a preference trainer: a second whole one unless adapters are trained, which are switched off for it (trl 1.16
    trainer/dpo_trainer.py, kto_trainer.py; grpo_trainer.py: only with beta). precompute_ref_log_probs loads it all the same."""
    settings, args, used = sources.settings, sources.args, sources.source.used
    beta = args.stated("beta")
    online = "GRPOTrainer" in used and beta is not None and isinstance(beta.value, (int, float)) and beta.value > 0
    if not (sources.loop == "dpo" or "KTOTrainer" in used or online) or "lora.r" in settings or "reference" in settings:
        return
    origin = settings.origin("loop") or Origin("loop")
    settings.put("reference", True, origin)
    message = "a frozen reference model stays beside the trained one; its own forward pass and logits are not modelled"
    settings.note("LG341", "info", message, origin)


def _evaluation(sources: Sources) -> None:
    """Up to generation_max_length tokens with num_beams, else what the model's generation config says (20 new ones without one)."""
    settings, args = sources.settings, sources.args
    stated = args.given.get("predict_with_generate")
    origin = stated.origin if stated else Origin("predict_with_generate")
    limit, beams = (
        args.stated("generation_max_length", "val_max_target_length", "max_target_length"),
        args.stated("generation_num_beams", "num_beams"),
    )
    tokens = positive(limit) if limit is not None and limit.value else int((sources.config or {}).get("max_length") or 20)
    sequences = int(settings.get("evaluation.batch_size")) * (positive(beams) if beams is not None and beams.value else 1)
    encoder_decoder = bool((sources.config or {}).get("is_encoder_decoder"))
    prompt = int(settings.get("seq_len") or 0)
    cached = tokens + prompt  # a decoder's prompt is in the same cache; of an encoder its output has a cache of its own
    _put(sources, "evaluation", sequences, cached, settings.get("strategy") == "fsdp1", False, origin, cross=encoder_decoder)


def _rollout(sources: Sources, origin: Origin) -> None:
    settings, args = sources.settings, sources.args
    completion, prompt = args.stated("max_completion_length", "max_new_tokens", "response_length"), args.stated("max_prompt_length")
    new = positive(completion) if completion is not None and completion.value else NEW_TOKENS
    tokens = new + (positive(prompt) if prompt is not None and prompt.value else PROMPT_TOKENS)
    if "seq_len" not in sources.stated:
        settings.put("seq_len", tokens, completion.origin if completion is not None else origin)
    if prompt is None or not prompt.value:
        message = f"prompts of {PROMPT_TOKENS} tokens are assumed beside {new} generated ones; --seq-len states both together"
        settings.note("LG210", "warning", message, origin)
    uses, mode = args.stated("use_vllm"), args.stated("vllm_mode")
    if uses is not None and uses.value:
        colocated = mode is None or mode.value == "colocate"
        if colocated:
            _note_vllm(sources, uses.origin)
        _put(sources, "rollout", 0, 0, False, True, uses.origin)
        return
    steps = args.stated("steps_per_generation") or Setting(settings.get("gradient_accumulation_steps", 1), origin)
    sequences = int(settings.get("micro_batch_size") or 1) * positive(steps)
    gather = args.stated("ds3_gather_for_generation")
    zero3 = settings.get("strategy") == "zero" and settings.get("zero.stage") == 3
    whole = zero3 and (gather is None or bool(gather.value))
    _put(
        sources, "rollout", sequences, int(settings.get("seq_len") or tokens), whole, False, gather.origin if gather is not None else origin
    )


def _note_vllm(sources: Sources, origin: Origin) -> None:
    """vLLM's share is taken before the first step and stays (without sleep mode)."""
    stated = sources.args.stated("vllm_gpu_memory_utilization")
    share = float(stated.value) if stated is not None and isinstance(stated.value, (int, float)) else VLLM_SHARE
    sources.settings.put("device_share", share, stated.origin if stated is not None else origin)
    message = f"vLLM takes {share:.0%} of each card (vllm_gpu_memory_utilization): the training has the rest"
    sources.settings.note("LG340", "info", message, stated.origin if stated is not None else origin)


def _put(
    sources: Sources, by: str, sequences: int, tokens: int, whole: bool, sync: bool, origin: Origin, cross: bool = False
) -> None:  # fmt: skip
    config = _text_config(sources.config or {})
    layers, width = _layers(config), _kv_width(config)
    half = str(sources.settings.get("precision.load") or "float32")
    layer = sequences * tokens * width * dtype_bytes(half)
    spec = GenerationSpec(by, sequences, 2 * layers * layer, layer, int(config.get("vocab_size") or 0), whole, sync)
    sources.settings.put("generation", spec, origin)
    what = (
        "weights are handed to vLLM tensor by tensor"
        if sync
        else f"{sequences} sequences of up to {tokens} tokens with their keys and values"
    )
    if whole:
        what += ", the whole model gathered on every device"
    message = f"generation is predicted as {what}; the prompt's own forward pass and sampling are not modelled"
    sources.settings.note(
        "LG340", "info", message + (" (the cross-attention cache is taken as long as the input)" if cross else ""), origin
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _layers(config: Mapping[str, Any]) -> int:
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers")
    return next((int(config[name]) for name in names if config.get(name)), 1)


def _kv_width(config: Mapping[str, Any]) -> int:
    """Elements of a key for one token in one layer."""
    hidden = next((int(config[name]) for name in ("hidden_size", "d_model", "n_embd") if config.get(name)), 0)
    heads = next((int(config[n]) for n in ("num_attention_heads", "decoder_attention_heads", "num_heads", "n_head") if config.get(n)), 1)
    size = int(config.get("head_dim") or config.get("d_kv") or hidden // heads)
    return int(config.get("num_key_value_heads") or heads) * size
