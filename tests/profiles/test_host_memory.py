"""What a job may use of this machine's main memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from launchguard.profiles import host_memory
from launchguard.units import GIB

TOTAL = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("lines", "file", "text", "expected"),
    [
        ("0::/job\n", "job/memory.max", "1073741824\n", GIB),
        ("0::/a/b\n", "a/memory.max", "2147483648\n", 2 * GIB),  # a limit of the group above holds, too
        ("0::/job\n", "job/memory.max", "max\n", TOTAL),
        ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", "1073741824\n", GIB),
        ("4:cpu,memory:/job\n", "memory/memory.limit_in_bytes", "1073741824\n", GIB),  # in a container: its own group is the root
        ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", "9223372036854771712\n", TOTAL),
        ("", "nothing", "", TOTAL),
    ],
)
def test_control_groups(tmp_path: Path, lines: str, file: str, text: str, expected: int) -> None:
    own = tmp_path / "own"
    own.write_text(lines)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    nbytes, source = host_memory({}, tmp_path, own)
    assert nbytes == expected
    assert source == ("/proc/meminfo" if expected == TOTAL else str(tmp_path / file))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2 * GIB),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, 2 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, TOTAL),  # --mem=0: all of the node
        ({"SLURM_MEM_PER_CPU": "512"}, TOTAL),
    ],
)
def test_slurm(tmp_path: Path, env: dict[str, str], expected: int) -> None:
    assert host_memory(env, tmp_path, tmp_path / "none")[0] == expected
