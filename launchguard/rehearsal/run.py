"""Run the ranks: each in a process of its own, in parallel as far as the machine allows, ended on time and cleaned up after."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launchguard.errors import InputError
from launchguard.job import LaunchSpec
from launchguard.profiles import DeviceProfile
from launchguard.rehearsal import files
from launchguard.rehearsal.build import Stubs, library_environment
from launchguard.rehearsal.card_environment import card_environment, contained, rank_environment, script_arguments
from launchguard.rehearsal.record import RankRecord, read_record

MAIN = Path(__file__).parent / "inside" / "main.py"
POLL_SECONDS = 0.05
LOG_LINES = 15


@dataclass(frozen=True)
class Plan:
    """One rehearsal. total_bytes: of the card; steps: optimizer steps, then the script is stopped (through_save: it goes on through one
    evaluation and one save to its end); time_limit: seconds for each rank; padding: batches hold padding."""

    launch: LaunchSpec
    device: DeviceProfile
    total_bytes: int
    ranks: tuple[int, ...]
    python: str
    stubs: Stubs
    communicator_bytes: int = 0
    steps: int = 2
    through_save: bool = False
    time_limit: float = 600.0
    jobs: int = 1
    random_weights: bool = False
    padding: bool = False
    allow_network: bool = False


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    rank: int
    deadline: float
    record: Path
    log: Path


def run(plan: Plan, env: Mapping[str, str], progress: Callable[[str], None]) -> tuple[RankRecord, ...]:
    """Rehearse every rank of the plan. Whatever happens, no process and no file of it is left."""
    waiting, running, done = list(plan.ranks), list[_Running](), list[RankRecord]()
    started = time.time_ns()
    with _scratch() as work:
        progress(f"rehearsing, files go to {work}")
        try:
            while waiting or running:
                while waiting and len(running) < plan.jobs:
                    running.append(_start(plan, waiting.pop(0), env, work))
                for one in [one for one in running if _has_ended(one)]:
                    running.remove(one)
                    done.append(_collect(one))
                    progress(f"rehearsed {len(done)} of {len(plan.ranks)} ranks")
                time.sleep(POLL_SECONDS)
        finally:
            for one in running:
                _kill(one)
        changed = files.changed_since(Path(plan.launch.cwd), started, ignored=work)
        done = [replace(record, changed=changed) for record in done]
    return tuple(sorted(done, key=lambda record: record.rank))


def _start(plan: Plan, rank: int, env: Mapping[str, str], work: Path) -> _Running:
    folder = work / f"r{rank}"  # short: sockets of worker processes lie below, and their paths end at 108 characters
    (folder / "t").mkdir(parents=True)
    launch = plan.launch
    order = {
        "script": launch.script, "script_args": script_arguments(launch, rank), "is_module": launch.is_module,
        "device": rank % launch.nproc_per_node, "steps": plan.steps, "through_save": plan.through_save, "padding": plan.padding,
        "random_weights": plan.random_weights, "communicator_bytes": plan.communicator_bytes, "work": str(folder),
        "record": str(folder / "record.json"),
    }  # fmt: skip
    (folder / "order.json").write_text(json.dumps(order))
    environment = {
        **contained(env, plan.allow_network), **launch.environment, **rank_environment(launch, rank), **library_environment(plan.stubs),
        **card_environment(plan.device, plan.total_bytes, launch.nproc_per_node),
    }  # fmt: skip
    environment |= files.files_environment(folder, environment)
    environment["PATH"] = f"{_programs(folder, plan.python)}:{environment.get('PATH', os.defpath)}"
    environment["TMPDIR"] = str(folder / "t")
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # the virtual cards are those that the job sees
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([plan.python, str(MAIN), str(folder / "order.json")], cwd=launch.cwd, env=environment,
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)  # fmt: skip
    return _Running(process, rank, time.monotonic() + plan.time_limit, folder / "record.json", log)


def _programs(folder: Path, python: str) -> Path:
    """A folder for the front of PATH, with the nvidia-smi of virtual cards."""
    programs = folder / "bin"
    programs.mkdir()
    smi = programs / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\nLD_PRELOAD= exec "{python}" "{MAIN.parent / "nvidia_smi.py"}" "$@"\n')
    smi.chmod(0o755)
    return programs


def _has_ended(one: _Running) -> bool:
    return one.process.poll() is not None or time.monotonic() > one.deadline


def _collect(one: _Running) -> RankRecord:
    """The record of a rank that has ended, or must end now."""
    timed_out = one.process.poll() is None
    _kill(one)
    text = "\n".join(one.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    work = one.record.parent
    if one.record.is_file():
        record = read_record(one.rank, json.loads(one.record.read_text()))
    else:
        record = RankRecord(one.rank, "timeout" if timed_out else "killed", exit_code=one.process.returncode)
    return replace(record, log=text, kept=files.kept(work), written=files.written(work))


def _kill(one: _Running) -> None:
    """The rank and everything that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="launchguard-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def distinct_ranks(launch: LaunchSpec, asked: str | None) -> tuple[int, ...]:
    """The ranks to rehearse: those asked for ("0,3"), else the first and the last. Raises InputError for a rank that does not exist."""
    if asked is None:
        return tuple(sorted({0, launch.world_size - 1}))
    try:
        ranks = tuple(sorted({int(text) for text in asked.split(",")}))
    except ValueError:
        raise InputError(f"not a list of ranks: {asked!r}", where="--ranks", help="write numbers: --ranks 0,3") from None
    outside = [rank for rank in ranks if not 0 <= rank < launch.world_size]
    if outside:
        raise InputError(f"rank {outside[0]} does not exist in a world of {launch.world_size}",
                         where="--ranks", help=f"give ranks from 0 to {launch.world_size - 1}")  # fmt: skip
    return ranks


def default_jobs(ranks: Sequence[int]) -> int:
    return max(1, min(len(ranks), os.cpu_count() or 1))


def interpreter(asked: str | None) -> str:
    return asked or sys.executable
