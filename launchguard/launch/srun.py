"""`srun [options] command ...`: SLURM starts the command once per task; what it starts is read by its own launcher.

srun's options as in its manual (slurm 24.05, srun.1): most take a value, those in _FLAGS do not. What the allocation already fixed is
taken from the SLURM_* variables that sbatch and salloc set (srun.1, INPUT and OUTPUT ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launchguard.errors import InputError
from launchguard.job import LaunchSpec, Note, Origin

_FLAGS = frozenset(
    "exclusive overlap label unbuffered pty verbose quiet overcommit oversubscribe no-kill multi-prog contiguous preserve-env test-only "
    "kill-on-bad-exit use-min-nodes spread-job reboot hold immediate disable-status interactive l u v Q O s k E H X q b I".split()
)
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
_SHELLS = ("bash", "sh", "zsh")
_PER_TASK = re.compile(r"\$\{?SLURM_(NODEID|PROCID|LOCALID)\}?")  # a value of its own in each task
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_RANK_FLAGS = ("--machine_rank", "--machine-rank", "--node_rank", "--node-rank")
_SEPARATORS = re.compile(r"&&|;|\n")


@dataclass(frozen=True)
class Step:
    """nodes, tasks_per_node: as srun will lay the step out; gpus: of a node that the step may use, None when not stated."""

    nodes: int
    tasks_per_node: int
    gpus: int | None


def matches(argv: Sequence[str]) -> bool:
    """srun under any path."""
    return os.path.basename(argv[0]) == "srun"


def parse(argv: Sequence[str], env: Mapping[str, str], cwd: str, gpus_per_node: int | None = None) -> LaunchSpec:
    """The launch inside, with the GPUs that the step is given; notes say where the step and the launcher do not go together."""
    from launchguard import launch

    options, command = _split(argv[1:])
    step = _step(options, env)
    words, in_task = _inside_shell(command)
    if not words:
        raise InputError("srun starts no command", where=" ".join(argv[:4]), help="srun [options] torchrun ... train.py")
    inner = launch.parse([_expanded(word, env, step) for word in words], env, cwd, step.gpus or gpus_per_node)
    if inner.launcher == "python":
        return _one_process_per_task(inner, step)
    return dataclasses.replace(inner, notes=inner.notes + tuple(_notes(inner, step, words, in_task)))


# ---------------------------------------------------------------- srun's own words
def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(options by long name, the command behind them)."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        word = words[at]
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name, value = _SHORT.get(word[1], word[1]), word[2:].lstrip("=")
            equals = "=" if value else ""
        if not equals and name not in _FLAGS:
            at += 1
            value = words[at] if at < len(words) else ""
        options[name] = value
        at += 1
    return options, [*words[at + 1 :]] if at < len(words) and words[at] == "--" else [*words[at:]]


def _step(options: Mapping[str, str], env: Mapping[str, str]) -> Step:
    nodes = _number(options.get("nodes", "").split("-")[-1], env, "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    tasks = _number(options.get("ntasks", ""), env, "SLURM_NTASKS")
    per_node = _number(options.get("ntasks-per-node", ""), env, "SLURM_NTASKS_PER_NODE")
    if per_node is None:
        per_node = max(1, -(-tasks // nodes)) if tasks is not None else 1
    return Step(nodes, per_node, _gpus(options, env, per_node, nodes))


def _gpus(options: Mapping[str, str], env: Mapping[str, str], tasks_per_node: int, nodes: int) -> int | None:
    """GPUs of one node: --gpus-per-node, --gres=gpu[:type]:N, --gpus-per-task, --gpus, else what the allocation says."""
    for name, factor, divisor in (("gpus-per-node", 1, 1), ("gres", 1, 1), ("gpus-per-task", tasks_per_node, 1), ("gpus", 1, nodes)):
        text = options.get(name, "")
        if name == "gres":
            text = next((part for part in text.split(",") if part.startswith("gpu")), "")
        count = text.split(":")[-1]
        if count.isdigit():
            return int(count) * factor // divisor
        if text == "gpu":
            return 1
    return _number("", env, "SLURM_GPUS_ON_NODE") or _number(env.get("SLURM_GPUS_PER_NODE", "").split(":")[-1], env)


def _number(text: str, env: Mapping[str, str], *names: str) -> int | None:
    """The first whole number among the text and these variables ("2(x2)" in SLURM_NTASKS_PER_NODE is 2)."""
    for candidate in (text, *(env.get(name, "") for name in names)):
        digits = re.match(r"\d+", candidate)
        if digits:
            return int(digits.group())
    return None


# ---------------------------------------------------------------- the command inside
def _inside_shell(command: Sequence[str]) -> tuple[list[str], bool]:
    """(words of the launch, do variables in them expand inside each task). `bash -c "a && torchrun ..."`: its last command."""
    if len(command) > 2 and os.path.basename(command[0]) in _SHELLS and command[1].startswith("-") and command[1].endswith("c"):
        parts = [part.strip() for part in _SEPARATORS.split(command[2]) if part.strip()]
        try:
            return (shlex.split(parts[-1]) if parts else []), True
        except ValueError as error:
            raise InputError(f"the command of {command[0]} -c cannot be read: {error}", where="srun", help="check its quotes") from None
    return list(command), False


def _expanded(word: str, env: Mapping[str, str], step: Step) -> str:
    """Variables as the first task sees them; one that is not known stays as it is."""
    known = {**env, "SLURM_NNODES": str(step.nodes), "SLURM_JOB_NUM_NODES": str(step.nodes), "SLURM_NODEID": "0", "SLURM_PROCID": "0",
             "SLURM_LOCALID": "0", "SLURM_NTASKS": str(step.nodes * step.tasks_per_node)}  # fmt: skip
    return _VARIABLE.sub(lambda m: known.get(m.group(1), m.group(0)), word)


def _one_process_per_task(inner: LaunchSpec, step: Step) -> LaunchSpec:
    """srun itself starts the ranks: the script, or what it imports, has to take its rank from SLURM_PROCID."""
    tasks = step.nodes * step.tasks_per_node
    if tasks == 1 or inner.world_size > 1:
        return inner
    message = f"srun starts {tasks} processes: they are one job only if the script takes its rank from SLURM_PROCID (Accelerate does not)"
    note = Note("LG245", "warning", message, "srun")
    return dataclasses.replace(inner, nnodes=step.nodes, nproc_per_node=step.tasks_per_node, notes=(*inner.notes, note),
                               world_size_origin=Origin("srun", "ntasks"))  # fmt: skip


def _notes(inner: LaunchSpec, step: Step, words: Sequence[str], in_task: bool) -> Iterator[Note]:
    if step.tasks_per_node > 1:
        message = f"srun starts {inner.launcher} {step.tasks_per_node} times on each node, and each starts {inner.nproc_per_node} processes"
        yield Note("LG245", "error", f"{message}: use one task per node", "srun:--ntasks-per-node")
    if step.nodes != inner.nnodes:
        message = f"srun runs on {step.nodes} nodes, but {inner.launcher} is told of {inner.nnodes}"
        yield Note("LG245", "error", message, str(inner.world_size_origin))
    if step.nodes > 1 and inner.nnodes > 1 and _is_static(inner) and not (in_task and _has_per_task_rank(words)):
        what = next((word for word in _rank_words(words)), "no rank of the node is given")
        message = (
            f"every node gets the same rank ({what}): the line is the same on all, and variables in it expand before srun starts tasks"
        )
        yield Note("LG246", "error", f"{message}; write bash -c '... --machine_rank $SLURM_PROCID ...' in single quotes", "srun")


def _is_static(inner: LaunchSpec) -> bool:
    """With torch's c10d or etcd rendezvous nodes find their rank themselves (torch/distributed/run.py)."""
    backend = inner.arguments.get("rdzv_backend")
    return backend is None or str(backend.value) in ("static", "None", "")


def _rank_words(words: Sequence[str]) -> Iterator[str]:
    """ "--machine_rank 0" as it stands in the line."""
    for at, word in enumerate(words):
        if word.split("=")[0] in _RANK_FLAGS:
            yield word if "=" in word else f"{word} {words[at + 1] if at + 1 < len(words) else ''}".strip()


def _has_per_task_rank(words: Sequence[str]) -> bool:
    return any(_PER_TASK.search(text) for text in _rank_words(words))
