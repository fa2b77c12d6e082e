"""The environment that a rehearsal runs in: which Python, which torch, and whether it is a CUDA build. Nothing of it is imported."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launchguard.errors import NotTold

# run by the other Python, so that its own search path decides; torch/version.py is three assignments
_PROBE = """
import importlib.util, json, os, runpy, sys, sysconfig
spec = importlib.util.find_spec("torch")
out = {"site": sysconfig.get_path("purelib"), "path": sys.path, "torch": None}
if spec and spec.origin:
    out["torch"] = os.path.dirname(spec.origin)
    names = runpy.run_path(os.path.join(out["torch"], "version.py"))
    out["version"], out["cuda"] = str(names.get("__version__")), names.get("cuda")
bnb = importlib.util.find_spec("bitsandbytes")
out["bitsandbytes"] = os.path.dirname(bnb.origin) if bnb and bnb.origin else None
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Target:
    """python: its interpreter; libraries: shared ones that ask for CUDA symbols; header_folders: where its wheels keep CUDA headers."""

    python: str
    torch_version: str
    cuda_version: str
    libraries: tuple[Path, ...]
    header_folders: tuple[Path, ...]

    @property
    def cuda_major(self) -> int:
        return int(self.cuda_version.split(".")[0])


def find_target(python: str) -> Target:
    """The environment of an interpreter. Raises NotTold when it has no CUDA build of torch."""
    facts = _probe(python)
    if facts["torch"] is None:
        raise NotTold("torch is not installed in the environment of the rehearsal", where=python,
                      help="pip install torch (a CUDA build; no GPU is needed)")  # fmt: skip
    if not facts["cuda"]:
        version = facts["version"].split("+")[0]
        raise NotTold(f"torch {facts['version']} is a CPU build, and a rehearsal runs the CUDA build on virtual cards", where=python,
                      help=f"pip install --no-deps torch=={version} --index-url https://download.pytorch.org/whl/cu130 "
                           "(no GPU and none of the nvidia wheels are needed), or name another environment: --python PATH")  # fmt: skip
    root = Path(facts["torch"])
    libraries = sorted((root / "lib").glob("*.so"))
    if facts["bitsandbytes"]:
        libraries += sorted(Path(facts["bitsandbytes"]).glob(f"libbitsandbytes_cuda{facts['cuda'].split('.')[0]}0.so"))
    site = Path(facts["site"]) / "nvidia"
    headers = (*site.glob("cu*/include"), site / "cuda_runtime" / "include")
    return Target(python, facts["version"], facts["cuda"], tuple(libraries), tuple(headers))


def _probe(python: str) -> dict[str, str]:
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, env={**os.environ, "LD_PRELOAD": ""})
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NotTold(
            f"this Python does not answer: {error}", where=python, help="name the interpreter of the job: --python PATH"
        ) from error
