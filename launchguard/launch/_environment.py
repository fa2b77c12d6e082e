"""The environment, read but never written: what ranks inherit, and how a library is shown one that is not this process's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Variables of the user's shell that change what a rank does; everything else in it is none of launchguard's business.
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "PYTORCH_", "HF_", "TRANSFORMERS_", "DS_", "XDG_CACHE_HOME")
_NAMES = ("CUDA_VISIBLE_DEVICES", "HOME")


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """The part of the caller's environment that ranks inherit and that the config readers look at; no tokens."""
    return {name: value for name, value in env.items() if (name.startswith(_PREFIXES) or name in _NAMES) and "TOKEN" not in name}


@contextmanager
def environ(env: Mapping[str, str]) -> Iterator[None]:
    """Within the block os.environ is a plain copy of `env`: a library may read or write it, the process's own stays untouched."""
    own = os.environ
    os.environ = dict(env)  # type: ignore[assignment]  # noqa: B003  (a plain dict on purpose: no putenv)
    try:
        yield
    finally:
        os.environ = own  # noqa: B003
