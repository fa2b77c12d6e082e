"""python tests/check_wheel.py DIST VENV: the wheel holds every file of the package, and works where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = (".py", ".yaml", ".json", ".typed", ".sbatch", ".sh", ".md")


def expected_files() -> set[str]:
    """Package files as the wheel names them: integrations/ is found through its link."""
    own = {p for p in (ROOT / "launchguard").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    linked = {
        ROOT / "launchguard" / "integrations" / p.relative_to(ROOT / "integrations")
        for p in (ROOT / "integrations").rglob("*")
        if p.is_file()
    }
    files = {str(p.relative_to(ROOT)) for p in own | linked if p.suffix in DATA}
    return {f for f in files if "__pycache__" not in f}


def main(dist: str, venv: str) -> int:
    wheel = next(Path(dist).glob("*.whl"))
    missing = expected_files() - set(zipfile.ZipFile(wheel).namelist())
    if missing:
        print(f"not in {wheel.name}: {', '.join(sorted(missing))}")
        return 1
    program = str(Path(venv).resolve() / "bin" / "launchguard")
    for arguments, code, text in (
        (["--version"], 0, "launchguard"),
        (["devices"], 0, "h100-80-sxm"),
        (["doctor"], 0, "not installed"),
        (["explain", "LG248"], 0, "nothing to shard"),
        (
            ["check", "--device", "24GiB", "--model", str(ROOT / "examples/models/tiny-llama"), "--", "python", "train.py"],
            0,
            "torch is not installed",
        ),
    ):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, cwd=venv)
        if done.returncode != code or text not in done.stdout + done.stderr or "Traceback" in done.stderr:
            print(f"launchguard {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
            return 1
    print(f"1 passed, 0 failed ({wheel.name}: all files there, runs without torch)")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
