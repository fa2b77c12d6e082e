"""One rehearsed rank: `python .../inside/main.py ORDER.json`. Runs the script to its end, or to the steps that were asked for, and writes
the record whatever happens. The exit status is the script's; 0 when it was stopped after its steps."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # sys/prctl.h


def main() -> None:
    started = time.perf_counter()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank never outlives the command that started it
    _make_importable()
    order = json.loads(Path(sys.argv[1]).read_text())
    from launchguard.rehearsal.inside.session import Session

    session = Session(order)
    error, code = None, 0
    try:
        _run_script(order)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:  # the record is written for every end
        error = e
        if not session.stopped_as_asked(e):
            traceback.print_exc()
            code = 1
    try:
        Path(order["record"]).write_text(json.dumps(session.record(error, code, time.perf_counter() - started)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # worker threads and half-built process groups have nothing more to say


def _make_importable() -> None:
    """This copy of launchguard, whatever the environment of the job has installed under that name."""
    root = Path(__file__).resolve().parents[2]
    sys.path.pop(0)  # the folder of this file
    spec = importlib.util.spec_from_file_location("launchguard", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["launchguard"] = module
    spec.loader.exec_module(module)


def _run_script(order: dict[str, Any]) -> None:
    """As the interpreter would: sys.argv, sys.path[0] and __main__ are the script's own."""
    script, arguments = order["script"], order["script_args"]
    if order["is_module"]:
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
