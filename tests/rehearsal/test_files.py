"""Side effects on disk: what a script writes is seen by it and by nobody else, whichever library writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchguard.rehearsal import build, files

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import ctypes, json, os, pathlib, shutil, subprocess, sys
def fails(error, function, *args):
    try: function(*args)
    except error: return True
    raise AssertionError(f"{function} {args} does not fail")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("stubs")
    build._compile(["gcc"], folder, folder, build.FILES_LIBRARY, set(), (build.STUBS / "files.c",))
    return folder / build.FILES_LIBRARY


class Held:
    """A user's folder, and scripts that run in it with their writes held back."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library, self.cwd, self.work = library, folder / "user", folder / "work"
        (self.cwd / "data").mkdir(parents=True)
        (self.cwd / "log.txt").write_text("old\n")
        (self.cwd / "data" / "a.txt").write_text("a")
        self.work.mkdir()

    def run(self, body: str) -> tuple[str, ...]:
        """Runs to its end, and the user's files are as they were. What it would have deleted, below the user's folder."""
        started = time.time_ns()
        env = {**os.environ, **files.files_environment(self.work, os.environ), "LD_PRELOAD": str(self.library), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", SCRIPT + body], cwd=self.cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert files.changed_since(self.cwd, started, ignored=self.work) == ()
        assert (self.cwd / "log.txt").read_text() == "old\n" and (self.cwd / "data" / "a.txt").read_text() == "a"
        assert sorted(p.name for p in self.cwd.iterdir()) == ["data", "log.txt"]
        return tuple(os.path.relpath(path, self.cwd) for path in files.kept(self.work))


@pytest.fixture
def held(library: Path, tmp_path: Path) -> Held:
    return Held(library, tmp_path)


def test_writes_are_seen_by_the_script_and_by_nobody_else(held: Held) -> None:
    kept = held.run("""
with open("log.txt", "a") as f: f.write("new\\n")
assert open("log.txt").read() == "old\\nnew\\n"
pathlib.Path("log.txt").write_text("changed"); assert pathlib.Path("log.txt").read_text() == "changed"
os.makedirs("out/deep", exist_ok=True); os.makedirs("data", exist_ok=True)
assert os.path.isdir("out/deep") and fails(FileExistsError, os.mkdir, "data") and fails(FileExistsError, os.mkdir, "out")
with open("out/deep/x.json", "w") as f: json.dump({"a": 1}, f)
assert os.listdir("out/deep") == ["x.json"] and os.path.getsize("out/deep/x.json") > 0
os.replace("out/deep/x.json", "out/y.json"); assert json.load(open("out/y.json")) == {"a": 1}
assert fails(FileExistsError, open, "data/a.txt", "x") and fails(FileNotFoundError, open, "missing/x", "w")
shutil.rmtree("out"); assert not os.path.exists("out")
""")  # fmt: skip
    assert kept == ()


def test_a_folder_of_both_lists_both(held: Held) -> None:
    held.run("""
open("data/b.txt", "w").write("b")
assert sorted(os.listdir("data")) == ["a.txt", "b.txt"] and sorted(os.listdir(".")) == ["data", "log.txt"]
assert sorted(str(p) for p in pathlib.Path(".").rglob("*.txt")) == ["data/a.txt", "data/b.txt", "log.txt"]
assert open("data/a.txt").read() == "a" and not os.path.islink("data/a.txt") and not os.path.islink("data")
open("data/a.txt", "w").write("mine"); assert open("data/a.txt").read() == "mine"
with open("log.txt", "r+") as f: f.write("OLD")
assert open("log.txt").read() == "OLD\\n"
""")  # fmt: skip


def test_deletes_and_moves_of_the_users_files_do_not_happen(held: Held) -> None:
    kept = held.run("""
os.remove("log.txt"); shutil.rmtree("data"); os.rename("log.txt", "moved.txt")
assert open("moved.txt").read() == "old\\n"
open("moved.txt", "a").write("more"); assert open("moved.txt").read() == "old\\nmore"
assert fails(FileNotFoundError, os.remove, "nothing") and fails(FileNotFoundError, os.rename, "nothing", "else")
""")  # fmt: skip
    assert kept == ("log.txt", "data")


def test_native_code_and_children_are_held_too(held: Held) -> None:
    kept = held.run("""
os.mkdir("out")
libc = ctypes.CDLL(None); libc.fopen.restype = ctypes.c_void_p; libc.fclose.argtypes = [ctypes.c_void_p]
libc.fclose(libc.fopen(b"out/by_c.txt", b"w")); assert os.path.exists("out/by_c.txt")
subprocess.check_call("echo child > out/by_child.txt; cp log.txt out/copy.txt; mv data/a.txt out/; rm -r data; touch new.txt", shell=True)
assert open("out/by_child.txt").read() == "child\\n" and open("out/copy.txt").read() == "old\\n" and os.path.exists("new.txt")
assert subprocess.check_output(["ls", "out"], text=True).split() == ["a.txt", "by_c.txt", "by_child.txt", "copy.txt"]
""")  # fmt: skip
    assert "data" in kept


def test_a_program_that_was_written_can_be_started(held: Held) -> None:
    held.run("""
with open("mine.sh", "w") as f: f.write("#!/bin/sh\\necho ran $0 in $PWD\\n")
os.chmod("mine.sh", 0o755)
assert subprocess.check_output(["./mine.sh"], text=True).startswith("ran ")
""")  # fmt: skip


def test_what_the_user_may_not_write_cannot_be_written(held: Held) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    (held.cwd / "data").chmod(0o500)
    held.run("""assert fails(PermissionError, open, "data/new.txt", "w")""")
    (held.cwd / "data").chmod(0o700)


def test_checkpoints_take_no_disk_and_can_be_loaded_again(held: Held) -> None:
    """torch's zip writer (C++) and safetensors' (Rust): zeros are holes, everything else is as it was."""
    held.run("""
import torch
from launchguard.rehearsal.inside import containment
containment.install()
from safetensors.torch import load_file, save_file
big, small = torch.zeros(16 << 20), torch.arange(1000)
torch.save({"model": big, "small": small, "step": 3}, "model.pt")
save_file({"w": big, "small": small}, "m.safetensors")
for name in ("model.pt", "m.safetensors"):
    stat = os.stat(name); assert stat.st_size > 64 << 20 and stat.st_blocks * 512 < 2 << 20, (name, stat)
for loaded in (torch.load("model.pt", mmap=True), torch.load("model.pt")):
    assert loaded["step"] == 3 and torch.equal(loaded["small"], small) and loaded["model"].shape == big.shape and not loaded["model"].any()
loaded = load_file("m.safetensors"); assert torch.equal(loaded["small"], small) and not loaded["w"].any()
mixed = torch.arange(1 << 20); torch.save(mixed, "mixed.pt"); assert torch.equal(torch.load("mixed.pt"), mixed)
""")  # fmt: skip


def test_what_changed_all_the_same_is_found(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("")
    (tmp_path / "scratch").mkdir()
    time.sleep(0.02)
    started = time.time_ns()
    time.sleep(0.02)
    (tmp_path / "scratch" / "x").write_text("")
    (tmp_path / "new.txt").write_text("")
    assert files.changed_since(tmp_path, started, ignored=tmp_path / "scratch") == (str(tmp_path / "new.txt"),)
