"""Generation by the job itself: weights made whole for it, keys and values that grow token by token, scores over the vocabulary; or weights
that are handed to an engine beside it. Sources: configs/generation.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from launchguard.events import Category
from launchguard.job import GenerationSpec
from launchguard.strategies._stream import Stream
from launchguard.units import dtype_bytes

PHASE = "generation"


class Weights(Protocol):
    """What an engine can do with its parameters."""

    def whole_model(self) -> Sequence[int]: ...

    def release_whole(self, handles: Sequence[int]) -> None: ...

    def synced_tensors(self) -> Sequence[int]: ...


def generate(stream: Stream, spec: GenerationSpec, weights: Weights) -> None:
    """One call of generate, at its longest: torch.cat makes a layer's longer tensor while the old one is there (transformers 5.24
    cache_utils.py:DynamicLayer.update); the scores of a step are float32, and so are their probabilities (generation/utils.py:_sample)."""
    stream.phase(PHASE)
    if spec.sync:
        for nbytes in weights.synced_tensors():
            stream.touch(nbytes, Category.COMMUNICATION, "weights handed to the engine")
        return
    held = weights.whole_model() if spec.whole else []
    cache = stream.alloc(spec.cache_bytes, Category.ACTIVATIONS, "keys and values")
    stream.touch(spec.layer_bytes, Category.TEMPORARIES, "keys of one layer, grown")
    stream.touch(2 * spec.sequences * spec.vocabulary * dtype_bytes("float32"), Category.TEMPORARIES, "scores and probabilities")
    stream.free(cache)
    if spec.whole:
        weights.release_whole(held)
