"""Finding the model's config.json, and reading the few facts of it that decide other settings. Weights are never looked at."""

from __future__ import annotations

import logging
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from launchguard.configs import _files
from launchguard.errors import InputError, NotTold
from launchguard.job import Origin

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "decoder")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_HUB_SECONDS = 10.0
_REMEDY = "give a local directory that holds config.json: --model DIR"


def is_callable(name: str) -> bool:
    """True for "module:callable"; a path or hub id has no colon of that kind."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load(name: str, origin: Origin, cwd: str, env: Mapping[str, str], revision: str | None = None) -> dict[str, Any] | None:
    """The config.json behind a directory, a .json file or a hub id; None for module:callable.

    A hub id is looked up in the local cache, where transformers would find it (huggingface_hub/constants.py: HF_HUB_CACHE, HF_HOME);
    only an id that is not there is asked of the hub, for this one file. Raises InputError when nothing is found.
    """
    path = _files.resolve_path(name, cwd)
    if os.path.isdir(path):
        return _read(os.path.join(path, "config.json"), f"{name.rstrip('/')}/config.json")
    if name.endswith(".json"):
        return _read(path, name)
    if is_callable(name):
        return None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"there is no model directory {name}", where=str(origin), help=_REMEDY)
    cached = _cached(name, env, revision or "main")
    if cached is not None:
        return _read(cached, f"{name}/config.json")
    return _from_hub(name, origin, env, revision)


def _read(path: str, shown: str) -> dict[str, Any]:
    return _files.parse_json(_files.read_text(path, os.getcwd(), "model config").strip(), shown, "model config")


def _cached(name: str, env: Mapping[str, str], revision: str) -> str | None:
    """config.json of a hub id in the local cache (huggingface_hub/file_download.py:try_to_load_from_cache)."""
    folder = os.path.join(_cache(env), "models--" + name.replace("/", "--"))
    reference = os.path.join(folder, "refs", revision)
    if os.path.isfile(reference):
        with open(reference, encoding="utf-8") as file:
            revision = file.read().strip()
    path = os.path.join(folder, "snapshots", revision, "config.json")
    return path if os.path.isfile(path) else None


def _cache(env: Mapping[str, str]) -> str:
    home = env.get("HOME", os.path.expanduser("~"))
    base = env.get("HF_HOME", os.path.join(env.get("XDG_CACHE_HOME", os.path.join(home, ".cache")), "huggingface"))
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if variable in env:
            return env[variable]
    return os.path.join(base, "hub")


def _from_hub(name: str, origin: Origin, env: Mapping[str, str], revision: str | None) -> dict[str, Any]:
    """config.json of a hub id over the network, given up after a few seconds."""
    if any(env.get(variable, "").lower() in ("1", "true", "yes", "on") for variable in _OFFLINE):
        raise NotTold(f"the model {name} is not in the local cache, and the hub is switched off", where=str(origin), help=_REMEDY)
    if not _resolves(env):
        raise NotTold(f"the model {name} is not in the local cache, and the hub cannot be reached (no such host)", where=str(origin),
                         help=_REMEDY)  # fmt: skip
    result: list[str | Exception] = []
    # A thread, because huggingface_hub retries for longer than anyone waits for a check.
    worker = threading.Thread(target=lambda: result.append(_download(name, _cache(env), revision)), daemon=True)
    worker.start()
    worker.join(_HUB_SECONDS)
    if result and isinstance(result[0], str):
        return _read(result[0], f"{name}/config.json")
    reason = type(result[0]).__name__ if result else f"no answer in {_HUB_SECONDS:.0f} s"
    message = f"the model {name} is not in the local cache, and the hub cannot be reached ({reason})"
    raise NotTold(message, where=str(origin), help=_REMEDY)


def _resolves(env: Mapping[str, str]) -> bool:
    """False when the hub's name has no address: a login node without network, told apart in no time and without retries."""
    if urllib.request.getproxies():
        return True
    host = urllib.parse.urlsplit(env.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        return bool(host and socket.getaddrinfo(host, 443))
    except OSError:
        return False


def _download(name: str, cache: str, revision: str | None) -> str | Exception:
    try:
        from huggingface_hub import hf_hub_download

        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        return str(hf_hub_download(name, "config.json", revision=revision, cache_dir=cache, etag_timeout=_HUB_SECONDS / 2))
    except Exception as error:  # whatever it is, the answer to the user is the same
        return error


# ---------------------------------------------------------------- facts
def checkpoint_dtype(config: Mapping[str, Any]) -> str | None:
    """dtype that the checkpoint was saved in ("torch_dtype" before transformers 5)."""
    for part in (config, *_text_parts(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key])
    return None


def hidden_size(config: Mapping[str, Any], nested: bool) -> int | None:
    """hidden_size, else the largest of hidden_sizes; nested: of text_config too, as the Trainer looks and Accelerate does not
    (transformers/integrations/deepspeed.py:trainer_config_finalize, accelerate/accelerator.py:_prepare_deepspeed)."""
    text = config.get("text_config")
    parts = (config, text) if nested and isinstance(text, Mapping) else (config,)
    for part in parts:
        for key in ("hidden_size", "d_model", "n_embd"):  # the last two: attribute_map of T5, BART, GPT-2
            if isinstance(part.get(key), int):
                return int(part[key])
        sizes = [size for size in _list(part.get("hidden_sizes")) if isinstance(size, int)]
        if sizes:
            return max(sizes)
    return None


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that the model's position embeddings allow."""
    for part in (config, *_text_parts(config)):
        for key in _POSITIONS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return None


def reads_tokens(config: Mapping[str, Any]) -> bool:
    """True for a model with a vocabulary; the length of an image model's sequence is its own."""
    return any("vocab_size" in part for part in (config, *_text_parts(config))) or "image_size" not in config


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)]
