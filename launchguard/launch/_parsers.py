"""Calling another program's argument parser without letting it print, exit or name itself after us."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from launchguard.errors import InputError

T = TypeVar("T")


def library(module: str, distribution: str) -> Any:
    """A module of an installed library, imported now. Raises InputError with the pip command when it is not there."""
    collecting = gc.isenabled()
    gc.disable()  # an import makes many objects and no garbage
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{distribution} cannot be imported, so its launch line cannot be read ({error})",
                         where=module, help=f"pip install {distribution}") from error  # fmt: skip
    finally:
        gc.freeze()  # what it made stays: later collections need not look at it
        if collecting:
            gc.enable()


def without_exit(parse: Callable[[], T], launcher: str) -> T:
    """parse(), with a parser's exit turned into an InputError that carries the parser's own last line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            return parse()
    except SystemExit as error:
        if error.code in (0, None):
            raise InputError(f"{launcher} would print a text and exit: nothing is launched", where=launcher,
                             help="check a command that starts a script") from None  # fmt: skip
        raise InputError(_last_line(output.getvalue()) or f"{launcher} rejects its arguments", where=launcher,
                         help=f"see {launcher} --help", code="LG250") from None  # fmt: skip


@contextlib.contextmanager
def refusals(launcher: str, where: str = "", code: str = "LG250") -> Iterator[None]:
    """What a launcher raises about its input becomes an InputError; its chatter on stdout and stderr is dropped."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    except InputError:
        raise
    except Exception as error:  # only the library's own code runs in the block; what it raises is its verdict on the input
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{launcher} refuses: {text}", where=where or launcher, help="it would stop with this error", code=code) from error


def _last_line(text: str) -> str:
    """ "prog: error: the following arguments are required: x" -> the part behind the program's name."""
    lines = [line for line in text.splitlines() if line.strip()]
    return re.sub(r"^\S+( \S+)*?: error: ", "", lines[-1]) if lines else ""
