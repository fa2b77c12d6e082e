"""Weights from the config alone: nothing is read from disk, and pages that nobody writes to cost no memory."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from launchguard.rehearsal.inside.libraries import after_import

INITIALISERS = ("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_",
                "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_")  # fmt: skip
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
                     torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip


class RandomWeights:
    """work: where stand-in checkpoints are written (sparse files)."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def install(self) -> None:
        for name in INITIALISERS:
            if hasattr(torch.nn.init, name):
                setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
        after_import({"transformers.modeling_utils": self.transformers})

    def transformers(self, module: Any) -> None:
        """PreTrainedModel.from_pretrained: the same loading path (device_map, dtype, zero.Init, quantisation), no weights of anybody's."""
        cls = module.PreTrainedModel
        original = cls.from_pretrained.__func__

        @functools.wraps(original)
        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("config")
            if not hasattr(config, "to_dict"):
                config = cls.config_class.from_pretrained(config or name)
            if kwargs.get("quantization_config") is not None or getattr(config, "quantization_config", None) is not None:
                return original(cls, self.stand_in(cls, config), *args, **{**kwargs, "config": config})
            key = "dtype" if "dtype" in kwargs or "torch_dtype" not in kwargs else "torch_dtype"
            if kwargs.get(key) in (None, "auto"):
                kwargs[key] = getattr(config, "dtype", None) or torch.float32
            return original(cls, None, *args, **{**kwargs, "config": config, "state_dict": {}})

        cls.from_pretrained = classmethod(from_pretrained)

    def stand_in(self, cls: Any, config: Any) -> str:
        """A checkpoint folder with a sparse file of zeros under the model's own names: quantised loading works weight by weight."""
        folder = self.work / f"weights-{len(os.listdir(self.work))}"
        folder.mkdir()
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = cls(config)
        tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
        dtype = getattr(config, "dtype", None) or torch.float32
        tensors = {
            name: (dtype if t.is_floating_point() else t.dtype, list(t.shape)) for name, t in model.state_dict().items() if name not in tied
        }
        write_sparse(folder / "model.safetensors", tensors)
        return str(folder)


def write_sparse(path: Path, tensors: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    """A safetensors file of zeros that takes no disk: header, then a hole. tensors: name -> (dtype, shape)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
