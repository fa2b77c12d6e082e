"""The stub CUDA libraries: built for the torch of one environment, once, into the cache.

Every undefined CUDA symbol of torch's libraries gets a definition under the same soname and symbol version. The C files of stubs/ have
behaviour; every other function returns 0 and touches nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchguard import __version__
from launchguard.errors import NotTold
from launchguard.rehearsal.target import Target

STUBS = Path(__file__).parent / "stubs"
CUDART_SOURCES = ("card.c", "memory.c", "copies.c", "kernels.c", "streams.c", "device.c")
FILES_LIBRARY = "liblaunchguardfiles.so"  # side effects on disk; nothing of CUDA
# libraries whose symbols carry no version: by prefix of the name, the longest first (NVIDIA's sonames, CUDA 12 and 13 alike)
UNVERSIONED = {"cusparseLt": "libcusparseLt.so.0", "cuFile": "libcufile.so.0", "nccl": "libnccl.so.2", "cu": "libcuda.so.1"}
NOT_CUDA = re.compile(r"GLIBC|GCC|CXXABI|GOMP|OMP_")
HEADER_WHEELS = {  # where no CUDA headers are installed: the two wheels that hold them
    12: ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12"),
    13: ("nvidia-cuda-runtime~=13.0", "nvidia-cuda-crt~=13.0"),
}
DEFINITION = re.compile(r"^[A-Za-z_][\w *]*?\b(\w+)\(")


@dataclass(frozen=True)
class Symbol:
    """An undefined dynamic symbol. version: its soname for CUDA's own libraries, None where it has none."""

    name: str
    version: str | None


@dataclass(frozen=True)
class Stubs:
    """Built libraries. preload: in the order of LD_PRELOAD; cudart: the one that keeps the books."""

    folder: Path
    preload: tuple[Path, ...]
    cudart: Path


def build(target: Target, cache: Path) -> Stubs:
    """The stub libraries for the torch of `target`, from the cache or built now (seconds). Raises NotTold when a tool is missing."""
    folder = cache / "rehearsal" / _key(target)
    if not (folder / "PRELOAD").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as work:  # it moves away
            _build(target, Path(work), cache)
            try:
                os.rename(work, folder)
            except OSError:  # another process was faster
                if not (folder / "PRELOAD").is_file():
                    raise
    names = (folder / "PRELOAD").read_text().split()
    preload = tuple(folder / name for name in names)
    return Stubs(folder, preload, next(path for path in preload if path.name.startswith("libcudart")))


def _key(target: Target) -> str:
    """Everything that the libraries depend on: our sources, torch's version and the libraries' sizes."""
    facts = [__version__, target.torch_version, target.cuda_version, *(f"{p.name} {p.stat().st_size}" for p in target.libraries)]
    sources = [path.read_bytes() for path in sorted(STUBS.iterdir())]
    return hashlib.sha256(b"\0".join([json.dumps(facts).encode(), Path(__file__).read_bytes(), *sources])).hexdigest()[:24]


def _build(target: Target, folder: Path, cache: Path) -> None:
    compiler = find_compiler()
    include = _headers(target, cache)
    wanted = _by_library(symbol for path in target.libraries for symbol in undefined_symbols(path))
    sources = _sources(next(soname for soname in wanted if soname.startswith("libcudart")))
    libraries = sorted({*wanted, *sources})
    for soname in libraries:
        _compile(compiler, include, folder, soname, wanted.get(soname, set()), sources.get(soname, ()))
    (folder / "PRELOAD").write_text("\n".join(libraries) + "\n")


def _sources(cudart: str) -> dict[str, tuple[Path, ...]]:
    return {
        cudart: tuple(STUBS / name for name in CUDART_SOURCES),
        "libcuda.so.1": (STUBS / "driver.c",),
        "libnvidia-ml.so.1": (STUBS / "nvml.c",),
        FILES_LIBRARY: (STUBS / "files.c",),
    }


# ---------------------------------------------------------------- what torch asks for
def undefined_symbols(library: Path) -> Iterator[Symbol]:
    """Undefined symbols of a shared library, with the version that it wants of each."""
    return (symbol for symbol, defined in _dynamic_symbols(library) if not defined)


def _dynamic_symbols(library: Path) -> Iterator[tuple[Symbol, bool]]:
    """(symbol, whether the library defines it)"""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise NotTold("pyelftools is not installed, and it reads what torch asks of CUDA", where="rehearsal",
                      help="pip install 'launchguard[rehearse]'") from None  # fmt: skip

    with library.open("rb") as file:
        elf: Any = ELFFile(file)  # its sections are typed by their common base
        symbols, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
        needed = elf.get_section_by_name(".gnu.version_r")
        names = {aux["vna_other"]: aux.name for _, auxiliaries in needed.iter_versions() for aux in auxiliaries} if needed else {}
        strings = elf.get_section(symbols["sh_link"]).data()
        numbers = struct.unpack(f"<{symbols.num_symbols()}H", versions.data()) if versions else ()
        for i, (name, _, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols.data())):
            if name:
                text = strings[name : strings.index(b"\0", name)].decode()
                yield Symbol(text, names.get(numbers[i] & 0x7FFF) if numbers else None), section != 0


def _by_library(symbols: Iterable[Symbol]) -> dict[str, set[Symbol]]:
    """soname -> the symbols that it must define."""
    wanted: dict[str, set[Symbol]] = {"libcurand.so.10": set()}
    for symbol in symbols:
        if symbol.version is None:
            if re.match(r"nccl|cu[A-Z]|cusparseLt", symbol.name):
                soname = next(soname for prefix, soname in UNVERSIONED.items() if symbol.name.startswith(prefix))
                wanted.setdefault(soname, set()).add(symbol)
        elif not NOT_CUDA.match(symbol.version):
            soname = "libnvshmem_host.so.3" if symbol.version == "NVSHMEM" else symbol.version
            wanted.setdefault(soname, set()).add(symbol)
    return wanted


# ---------------------------------------------------------------- compiling
def find_compiler() -> list[str]:
    """A C compiler: $CC, gcc, clang, cc, or zig of the PyPI package ziglang. Raises NotTold when there is none."""
    for name in (os.environ.get("CC"), "gcc", "clang", "cc"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NotTold("no C compiler is here, and the stub CUDA libraries are compiled on first use", where="gcc, clang, cc",
                  help="install gcc or clang, or: pip install ziglang")  # fmt: skip


def _compile(compiler: Sequence[str], include: Path, folder: Path, soname: str, symbols: set[Symbol], sources: Sequence[Path]) -> None:
    """One shared library: its sources with behaviour, special cases from libraries.c, and a `return 0` for everything else."""
    compile_shared = [*compiler, "-w", "-shared", "-fPIC", "-O2", f"-I{include}", f"-I{STUBS}", "-lpthread", "-ldl"]
    defined = _defined_by(compile_shared, folder / f"{soname}.probe", sources) if sources else set()
    special = _definitions(STUBS / "libraries.c")
    names = sorted({symbol.name for symbol in symbols} - defined)
    stub = folder / f"{soname}.c"
    stub.write_text('#include "handles.h"\n' + "".join(special.get(name, f"long {name}(void) {{ return 0; }}") + "\n" for name in names))
    command = [*compile_shared, "-o", str(folder / soname), *map(str, sources), str(stub), f"-Wl,-soname,{soname}"]
    script = _version_script(symbols, own=soname.startswith("libcudart"))
    if script:
        path = folder / f"{soname}.map"
        path.write_text(script)
        command.append(f"-Wl,--version-script={path}")
    _run(command, soname)


def _defined_by(compile_shared: Sequence[str], probe: Path, sources: Sequence[Path]) -> set[str]:
    """What the sources define with these headers: the preprocessor leaves some functions out by CUDA version."""
    _run([*compile_shared, "-o", str(probe), *map(str, sources)], probe.stem)
    names = {symbol.name for symbol, defined in _dynamic_symbols(probe) if defined}
    probe.unlink()
    return names


def _run(command: Sequence[str], soname: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotTold(f"the stub library {soname} does not compile: {_first_error(done.stderr)}", where=command[0],
                      help="set CC to another compiler; launchguard check needs none")  # fmt: skip


def _definitions(path: Path) -> dict[str, str]:
    """name -> its one-line definition."""
    return {m.group(1): line for line in path.read_text().splitlines() if (m := DEFINITION.match(line)) and line.endswith("}")}


def _version_script(symbols: Iterable[Symbol], own: bool) -> str:
    versions: dict[str, list[str]] = {"LAUNCHGUARD": ["vcard*"]} if own else {}
    for symbol in sorted(symbols, key=lambda s: s.name):
        if symbol.version:
            versions.setdefault(symbol.version, []).append(symbol.name)
    return "".join(f"{version} {{ global: {' '.join(name + ';' for name in names)} }};\n" for version, names in versions.items())


def _first_error(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line), text.strip()[:200] or "the compiler said nothing")


# ---------------------------------------------------------------- headers
def _headers(target: Target, cache: Path) -> Path:
    """A folder with cuda_runtime_api.h and cuda.h: of installed wheels, a CUDA toolkit, else wheels fetched into the cache."""
    fetched = cache / "rehearsal" / f"cuda{target.cuda_major}-headers"
    toolkit = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for folder in (*target.header_folders, *toolkit, Path("/usr/local/cuda/include"), fetched):
        if (folder / "crt" / "host_defines.h").is_file() and _major_of(folder) == target.cuda_major:
            return folder
    _fetch_headers(target, fetched)
    return fetched


def _major_of(folder: Path) -> int | None:
    """CUDA's major version by its own header; None where it is not."""
    header = folder / "cuda_runtime_api.h"
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace")) if header.is_file() else None
    return int(found.group(1)) // 1000 if found else None


def _fetch_headers(target: Target, folder: Path) -> None:
    wheels = HEADER_WHEELS.get(target.cuda_major)
    if wheels is None:
        raise NotTold(
            f"rehearsal knows CUDA 12 and 13, not {target.cuda_version}", where=f"torch {target.torch_version}", help="use another torch"
        )
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, *wheels]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotTold("no CUDA headers are here and they cannot be fetched", where="cuda_runtime_api.h",
                          help=f"pip install --no-deps {' '.join(wheels)}, or set CUDA_HOME to a CUDA toolkit")  # fmt: skip
        for wheel in Path(work).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                _extract_headers(archive, folder)


def _extract_headers(archive: zipfile.ZipFile, folder: Path) -> None:
    """Everything below an include folder of the wheel, into one folder: CUDA 12 spreads its headers over several wheels."""
    for name in archive.namelist():
        _, found, rest = name.partition("/include/")
        if found and rest and not name.endswith("/"):
            path = folder / rest
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def library_environment(stubs: Stubs) -> Mapping[str, str]:
    """The environment that puts the stubs in front of every real CUDA library: preloaded ones win over torch's RPATH."""
    return {"LD_PRELOAD": ":".join(map(str, stubs.preload)), "LD_LIBRARY_PATH": str(stubs.folder), "LAUNCHGUARD_CUDART": str(stubs.cudart)}
