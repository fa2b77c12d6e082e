"""The command line: launchguard check | run | rehearse | explain | devices | doctor.

stdout carries the answer, stderr progress and errors. Exit codes. check: 0 fits, 1 exceeds, 2 bad input or usage, 3 unknown with --strict,
4 the stand-in of --engine rehearse failed. rehearse: as check, 4 the script itself failed. run: the child's own; 78 refused because it
would not fit; 125 launchguard could not work, with --strict; 2 the job's own files are broken.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launchguard import __version__
from launchguard.errors import InputError, LaunchguardError, NotTold

if TYPE_CHECKING:
    from launchguard.verdict import Verdict

FITS, EXCEEDS, BAD_INPUT, UNKNOWN, SCRIPT_FAILED, REFUSED, CANNOT_WORK, INTERRUPTED = 0, 1, 2, 3, 4, 78, 125, 130
COMMAND_NOT_FOUND, COMMAND_NOT_EXECUTABLE = 127, 126
PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _option(flag: str, *names: str, **kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option with its environment twin LAUNCHGUARD_<NAME>."""
    return click.option(flag, *names, envvar="LAUNCHGUARD_" + flag.lstrip("-").replace("-", "_").upper(), show_envvar=False, **kwargs)


PREDICTION_OPTIONS = (
    _option("--model", metavar="PATH|ID|module:callable", help="The model, where the command does not name it."),
    _option("--device", metavar="NAME[,NAME]|BYTES|auto", help="The card that the job will run on (default: this node's, through NVML)."),
    _option("--device-used", metavar="BYTES", help="What other processes hold of each card, where NVML cannot say (e.g. 3GiB)."),
    _option("--headroom", metavar="10%|6GiB", help="Device memory to keep free (default 10%)."),
    _option("--host-memory", metavar="512GiB", help="Main memory of a node (default: this node's, where the job's GPUs are here)."),
    _option("--micro-batch-size", type=click.IntRange(1), help="Samples per device and micro-batch."),
    _option("--seq-len", type=click.IntRange(1), help="Longest sequence, in tokens."),
    _option("--lengths", metavar="FILE", help="Lengths of the samples (JSON, JSON lines, CSV, a saved dataset): longest and percentiles."),
    _option("--gpus-per-node", type=click.IntRange(1), help="Devices per node, where the command leaves that to the node."),
    _option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any field of the job, e.g. zero.stage=3."),
    _option("--json", "json_file", metavar="FILE|-", help="Write the report as JSON (schema 1)."),
    _option("--engine", type=click.Choice(["trace", "rehearse"]), default="trace", help="rehearse: run a stand-in job on virtual cards."),
    _option("--python", metavar="PATH", help="With --engine rehearse: interpreter with the job's libraries (default: this one)."),
    _option("--no-cache", is_flag=True, help="Trace the model again, and do not keep the trace."),
    _option("--strict", is_flag=True, help="Treat what cannot be told as a failure."),
    _option("--quiet", is_flag=True, help="Print the answer alone."),
)


def _with_options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            f = option(f)
        return f

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="launchguard")
def cli() -> None:
    """Predict every rank's GPU memory before a distributed training job starts, and refuse what would die."""


@cli.command(context_settings=PASS_THROUGH)
@_with_options(
    *PREDICTION_OPTIONS,
    _option("--deepspeed", metavar="FILE", help="Without a command: the DeepSpeed JSON."),
    _option("--accelerate", metavar="FILE", help="Without a command: the Accelerate YAML."),
    _option("--fsdp", metavar="FILE", help="Without a command: the FSDP config (JSON)."),
    _option("--job", metavar="FILE", help="The job file (default: launchguard.yaml beside the script)."),
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def check(command: tuple[str, ...], **options: Any) -> int:
    """Predict a launch command and report: launchguard check [options] -- accelerate launch train.py ..."""
    outcome = _predict(command, options)
    _report(outcome, options, answer_only=options["quiet"])
    return _verdict_code(outcome.verdict, options["strict"])


@cli.command(context_settings=PASS_THROUGH)
@_with_options(
    *PREDICTION_OPTIONS,
    _option("--on-exceed", type=click.Choice(["abort", "warn"]), default="abort", help="What to do with a job that would not fit."),
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(command: tuple[str, ...], **options: Any) -> int:
    """Check a launch command, then become it if it fits: launchguard run [options] -- deepspeed train.py ..."""
    try:
        refused = _guard(command, options)
    except NotTold as e:
        refused = _could_not_tell(_described(e), options)
    except InputError:
        raise  # the job's own files are broken: it would die at start
    except Exception as e:  # a guard that cannot work must not stop a good job
        refused = _could_not_tell(_internal(e), options)
    if refused is not None:
        return refused
    _become(command)


def _guard(command: Sequence[str], options: dict[str, Any]) -> int | None:
    """Exit code of a refusal; None: launch. Everything goes to stderr: stdout is the child's."""
    outcome = _predict(command, options)
    _report(outcome, options, answer_only=True, stream=sys.stderr)
    verdict = outcome.verdict.verdict
    if verdict == "unknown" and options["strict"]:
        return CANNOT_WORK
    if verdict == "exceeds" and options["on_exceed"] == "abort":
        click.echo("launchguard: not launched (--on-exceed warn launches all the same)", err=True)
        return REFUSED
    return None


@cli.command(context_settings=PASS_THROUGH)
@_with_options(
    _option("--device", metavar="NAME|BYTES", help="The card to rehearse on (default: this node's, through NVML)."),
    _option("--headroom", metavar="10%|6GiB", help="Device memory to keep free (default: none, the whole card)."),
    _option("--gpus-per-node", type=click.IntRange(1), help="Devices per node, where the command leaves that to the node."),
    _option("--ranks", metavar="0,3", help="Ranks to run (default: the first and the last)."),
    _option("--steps", type=click.IntRange(1), default=2, show_default=True, help="Optimizer steps, then the script is stopped."),
    _option("--through", type=click.Choice(["save"]), help="Go on through one evaluation and one save, to the script's end."),
    _option("--time-limit", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds for each rank."),
    _option("--jobs", type=click.IntRange(1), help="Ranks at a time (default: as many as there are cores)."),
    _option("--random-weights", is_flag=True, help="Build models from their config: no weights are read, none need exist."),
    _option("--padding", is_flag=True, help="Batches hold padding (default: masks are full)."),
    _option("--allow-network", is_flag=True, help="Let the script reach the model hub."),
    _option("--python", metavar="PATH", help="Interpreter with the job's libraries (default: this one)."),
    _option("--json", "json_file", metavar="FILE|-", help="Write the report as JSON (schema 1)."),
    _option("--strict", is_flag=True, help="Treat what cannot be told as a failure."),
    _option("--quiet", is_flag=True, help="Print the answer alone."),
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def rehearse(command: tuple[str, ...], **options: Any) -> int:
    """RUN the command's script, unmodified, on virtual GPUs: launchguard rehearse [options] -- torchrun train.py ...

    The real CUDA torch, DeepSpeed, FSDP and Trainer, no GPU. Your code is executed: what it writes goes to a scratch folder (caches stay
    where they are), trackers are off, the hub is offline.
    """
    outcome = _predict(command, options, run_script=True)
    _report(outcome, options, answer_only=options["quiet"])
    return _verdict_code(outcome.verdict, options["strict"])


def _verdict_code(verdict: Verdict, strict: bool) -> int:
    if any(note.code == "LG105" for note in verdict.notes):
        return SCRIPT_FAILED
    if verdict.verdict == "unknown":
        return UNKNOWN if strict else FITS
    return EXCEEDS if verdict.verdict == "exceeds" else FITS


def _before_running(what: str, quiet: bool) -> None:
    """Say that code is executed; from here on signals end the command as Ctrl-C does: nothing is left running or on disk."""
    if not quiet:
        click.echo(f"launchguard: running {what} on virtual cards; no GPU is used, and what it writes is thrown away", err=True)

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def _could_not_tell(reason: str, options: dict[str, Any]) -> int | None:
    click.echo(reason, err=True)
    if options["strict"]:
        return CANNOT_WORK
    click.echo("launchguard: cannot tell, so the job is launched (--strict refuses instead)", err=True)
    return None


def _become(command: Sequence[str]) -> NoReturn:
    """Replace this process by the command: its signals, exit code, stdin and environment are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], list(command))
    except FileNotFoundError:
        click.echo(f"launchguard: command not found: {command[0]}", err=True)
        code = COMMAND_NOT_FOUND
    except OSError as e:
        click.echo(f"launchguard: cannot execute {command[0]}: {e.strerror}", err=True)
        code = COMMAND_NOT_EXECUTABLE
    raise SystemExit(code)


# ---------------------------------------------------------------- predicting and reporting
def _predict(command: Sequence[str], options: dict[str, Any], run_script: bool = False, advise: bool = True) -> Any:
    from launchguard import preflight

    if run_script or options["engine"] == "rehearse":
        _before_running("the script" if run_script else "a stand-in for the script", quiet=options["quiet"])
    given = {k: v for k, v in options.items() if v not in (None, False, ())}
    given["set"] = dict(_key_value(text) for text in options.get("settings") or ())
    given.pop("settings", None)
    with _Progress(quiet=options["quiet"]) as progress:
        if run_script:
            return preflight.rehearse(tuple(command), dict(os.environ), os.getcwd(), given, progress)
        return preflight.preflight(tuple(command), dict(os.environ), os.getcwd(), given, progress, advise)


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"not a setting: {text!r}", where="--set", help="write KEY=VALUE, e.g. --set zero.stage=3")
    return key, value


def _report(outcome: Any, options: dict[str, Any], answer_only: bool, stream: Any = None) -> None:
    from launchguard.report import text

    stream = stream or sys.stdout
    target = options.get("json_file")
    if target:
        from launchguard.report.json import to_dict

        document = json.dumps(to_dict(outcome.verdict, outcome.advice), indent=1) + "\n"
        if target == "-":
            sys.stdout.write(document)
            return
        try:
            Path(target).write_text(document)
        except OSError as e:
            raise InputError(f"cannot write {target}: {e.strerror}", where="--json", help="name a file in a folder that exists") from None
    color = stream.isatty() and not os.environ.get("NO_COLOR")
    render = text.render_answer if answer_only else text.render
    stream.write(render(outcome.verdict, outcome.advice, color=color, width=shutil.get_terminal_size((120, 40)).columns))
    stream.flush()


class _Progress:
    """One changing line on stderr while a terminal watches; nothing otherwise. No thread: the trace worker is forked."""

    def __init__(self, quiet: bool) -> None:
        self.active = sys.stderr.isatty() and not quiet
        self.live: Any = None

    def __enter__(self) -> Callable[[str], None]:
        if self.active:
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self.live.start()
        return self.show

    def show(self, text: str) -> None:
        if self.live is not None:
            self.live.update(f"launchguard: {text} ...", refresh=True)

    def __exit__(self, *args: object) -> None:
        if self.live is not None:
            self.live.stop()


# ---------------------------------------------------------------- what is known here
@cli.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def devices(as_json: bool) -> int:
    """Known devices and their usable bytes."""
    from launchguard.profiles import devices as known
    from launchguard.report.listings import device_table

    if as_json:
        rows = [
            {"id": d.id, "name": d.name, "total_bytes": d.total_bytes, "context_bytes": d.context_bytes, "source": d.source}
            for d in known()
        ]
        click.echo(json.dumps(rows, indent=1))
        return FITS
    click.echo(device_table(known(), width=shutil.get_terminal_size((120, 40)).columns), nl=False)
    return FITS


@cli.command(context_settings=PASS_THROUGH)
@_with_options(*PREDICTION_OPTIONS, click.option("--peak", is_flag=True, help="What is alive at the predicted peak of a launch command."))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CODE | -- COMMAND ...]")
def explain(words: tuple[str, ...], peak: bool, **options: Any) -> int:
    """What a CODE means (without one: all of them); or, with --peak, everything alive at the peak of a job."""
    from launchguard.report import explain as pages

    if peak:
        click.echo(pages.peak(_predict(words, options, advise=False).verdict), nl=False)
    elif len(words) > 1:
        raise InputError("explain takes one code", where=" ".join(words), help="launchguard explain LG248, or --peak -- COMMAND ...")
    else:
        click.echo(pages.page(words[0]) if words else pages.listing(), nl=False)
    return FITS


@cli.command()
def doctor() -> int:
    """Versions, detected devices, free memory, and what can be predicted here."""
    from launchguard.report.listings import doctor_report

    click.echo(doctor_report(width=shutil.get_terminal_size((120, 40)).columns), nl=False)
    return FITS


# ---------------------------------------------------------------- errors
def _described(e: LaunchguardError) -> str:
    """ "error[CODE]: fact (where)" and "help: remedy" on a line of their own."""
    where = f" ({e.where})" if e.where and e.where not in e.message else ""
    label = f"error[{e.code}]" if e.code else "error"
    return f"{label}: {e.message}{where}" + (f"\nhelp: {e.help}" if e.help else "")


def _internal(e: BaseException) -> str:
    if os.environ.get("LAUNCHGUARD_DEBUG"):
        traceback.print_exc()
    return f"error: launchguard failed: {type(e).__name__}: {e}\nhelp: this is a fault of launchguard; LAUNCHGUARD_DEBUG=1 shows where"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point: every end is an exit code and at most two lines on stderr, never a traceback."""
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="launchguard", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        code = e.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except LaunchguardError as e:
        click.echo(_described(e), err=True)
        code = BAD_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FITS
    except Exception as e:  # a fault of ours: say so in a line
        click.echo(_internal(e), err=True)
        code = CANNOT_WORK
    sys.exit(code if isinstance(code, int) else FITS)
