"""The stub libraries: what torch asks for is what they define."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launchguard.errors import NotTold
from launchguard.rehearsal import build, target
from launchguard.rehearsal.build import Symbol

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@needs_compiler
def test_undefined_symbols_are_read_with_their_versions(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int cudaFoo(void); int cublasBar(void); int defined_here(void) { return cudaFoo() + cublasBar(); }")
    (tmp_path / "b.c").write_text("int cudaFoo(void) { return 1; }")
    (tmp_path / "b.map").write_text("libcudart.so.13 { global: cudaFoo; };")
    cc = ["gcc", "-shared", "-fPIC"]
    subprocess.check_call([*cc, "-o", "libb.so", "b.c", "-Wl,--version-script=b.map"], cwd=tmp_path)
    subprocess.check_call([*cc, "-o", "liba.so", "a.c", "-L.", "-lb"], cwd=tmp_path)
    found = set(build.undefined_symbols(tmp_path / "liba.so"))
    assert {Symbol("cudaFoo", "libcudart.so.13"), Symbol("cublasBar", None)} <= found
    assert "defined_here" not in {symbol.name for symbol in found}


def test_symbols_go_to_the_library_that_owns_them() -> None:
    wanted = build._by_library([
        Symbol("cudaMalloc", "libcudart.so.13"), Symbol("ncclAllReduce", None), Symbol("cusparseLtInit", None), Symbol("cuInit", None),
        Symbol("cuFileOpen", None), Symbol("memcpy", "GLIBC_2.14"), Symbol("nvshmem_x", "NVSHMEM"), Symbol("other", None),
    ])  # fmt: skip
    names = {soname: {s.name for s in symbols} for soname, symbols in wanted.items() if symbols}
    assert names == {
        "libcudart.so.13": {"cudaMalloc"}, "libnccl.so.2": {"ncclAllReduce"}, "libcusparseLt.so.0": {"cusparseLtInit"},
        "libcuda.so.1": {"cuInit"}, "libcufile.so.0": {"cuFileOpen"}, "libnvshmem_host.so.3": {"nvshmem_x"},
    }  # fmt: skip


def test_a_stub_is_written_for_what_has_no_source(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    symbols = {Symbol("cudnnCreate", "libcudnn.so.9"), Symbol("cudnnFoo", "libcudnn.so.9"), Symbol("cudnnGetVersion", "libcudnn.so.9")}
    build._compile(["gcc"], tmp_path, tmp_path, "libcudnn.so.9", symbols, ())
    text = (tmp_path / "libcudnn.so.9.c").read_text()
    assert (
        "long cudnnFoo(void) { return 0; }" in text and "new_handle(h)" in text and "long cudnnGetVersion(void) { return 0; }" not in text
    )


@needs_compiler
def test_what_the_preprocessor_leaves_out_is_not_defined(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("#if 0\nint cudaOld(void) { return 0; }\n#endif\nint cudaNew(void) { return 0; }\n")
    defined = build._defined_by(["gcc", "-shared", "-fPIC"], tmp_path / "a.probe", [tmp_path / "a.c"])
    assert "cudaNew" in defined and "cudaOld" not in defined


def test_headers_of_another_major_version_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    assert build._major_of(tmp_path) == 13 and build._major_of(tmp_path / "none") is None


def test_a_cpu_torch_is_told_which_wheel_to_install() -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("a CUDA build is installed here")
    with pytest.raises(NotTold) as caught:
        target.find_target(sys.executable)
    assert "CPU build" in caught.value.message and "no GPU" in caught.value.help and "--no-deps torch==" in caught.value.help


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotTold) as caught:
        build.find_compiler()
    assert "ziglang" in caught.value.help


def test_an_interpreter_that_does_not_answer() -> None:
    with pytest.raises(NotTold) as caught:
        target.find_target("/no/such/python")
    assert "--python" in caught.value.help


def test_the_cache_key_changes_with_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = target.Target("python", "2.14.1", "13.0", (), ())
    before = build._key(environment)
    shutil.copytree(build.STUBS, tmp_path / "stubs")
    (tmp_path / "stubs" / "card.c").write_text("changed")
    monkeypatch.setattr(build, "STUBS", tmp_path / "stubs")
    assert build._key(environment) != before
    assert build._key(target.Target("python", "2.14.2", "13.0", (), ())) != build._key(environment)


# ---------------------------------------------------------------- the books, through the built library
@pytest.fixture(scope="module")
def cudart(vgpu_python: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    stubs = build.build(target.find_target(vgpu_python), tmp_path_factory.mktemp("cache"))
    library = ctypes.CDLL(str(stubs.cudart))
    library.vcard_used.restype = library.vcard_peak.restype = ctypes.c_uint64
    library.cudaFree.argtypes = [ctypes.c_void_p]
    library.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _malloc(cudart: ctypes.CDLL, nbytes: int) -> tuple[int, int]:
    pointer = ctypes.c_void_p()
    code = cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    return code, pointer.value or 0


def test_memory_is_charged_in_pages_and_refused_at_the_end(cudart: ctypes.CDLL) -> None:
    before = cudart.vcard_used(0)
    code, pointer = _malloc(cudart, (2 << 20) + 1)
    assert code == 0 and cudart.vcard_used(0) - before == 4 << 20
    refused, _ = _malloc(cudart, 80 << 30)
    assert refused == 2 and cudart.vcard_used(0) - before == 4 << 20, "cudaErrorMemoryAllocation, and nothing charged"
    assert cudart.cudaFree(pointer) == 0 and cudart.vcard_used(0) == before
    assert cudart.vcard_peak(0) - before >= 4 << 20


def test_what_was_copied_to_the_card_reads_back_until_a_kernel_runs(cudart: ctypes.CDLL) -> None:
    _, pointer = _malloc(cudart, 512)
    three, back = ctypes.c_int64(3), ctypes.c_int64(-1)
    cudart.cudaMemcpy(pointer, ctypes.addressof(three), 8, 1)
    cudart.cudaMemcpy(ctypes.addressof(back), pointer, 8, 2)
    assert back.value == 3
    cudart.cudaMemset(ctypes.c_void_p(pointer), 0, ctypes.c_size_t(8))
    back.value = -1
    cudart.cudaMemcpy(ctypes.addressof(back), pointer, 8, 2)
    assert back.value == 0
    cudart.cudaFree(pointer)


def test_large_reads_give_zeros_without_writing_pages(cudart: ctypes.CDLL) -> None:
    import mmap

    size = 8 << 20
    _, pointer = _malloc(cudart, size)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.write(b"\1" * size)
    view = ctypes.c_char.from_buffer(region)
    cudart.cudaMemcpy(ctypes.addressof(view) + 100, pointer, size - 200, 2)
    del view
    assert region[:100] == b"\1" * 100 and region[-100:] == b"\1" * 100
    assert region[100 : size - 100] == b"\0" * (size - 200)
    cudart.cudaFree(pointer)
