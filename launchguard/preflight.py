"""The flow of launchguard, from a launch command to a verdict with advice: the table of contents of the code base."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchguard import advice, configs, launch, rehearsed, strategies
from launchguard.errors import InputError, LaunchguardError, NotTold, Unpredictable
from launchguard.events import StepTrace
from launchguard.job import JobSpec, LaunchSpec, ModelSpec, Note
from launchguard.profiles import DeviceProfile, communicator_bytes, detect, device
from launchguard.units import gib, parse_bytes
from launchguard.verdict import (
    Advice,
    DeviceBudget,
    LengthPrediction,
    Verdict,
    device_budget,
    judge,
    length_prediction,
    unknown_verdict,
    with_lengths,
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What `check` found: the verdict, and what would make the job fit when it does not."""

    verdict: Verdict
    advice: tuple[Advice, ...] = ()


def preflight(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, options: Mapping[str, Any], progress: Progress, advise: bool = True
) -> Outcome:
    """Predict a launch command. Nothing is launched, no file of the user's is written. advise: look for changes that fit.
    A job that cannot be simulated gives the verdict "unknown". Raises InputError for input that cannot be used."""
    started = time.perf_counter()
    progress("reading the launch command")
    gpus = configs.gpus_per_node(options, cwd)
    if argv:
        spec = launch.parse(argv, env, cwd, gpus_per_node=gpus)
    else:
        spec = launch.without_command(env, cwd, accelerate_config=options.get("accelerate"), gpus_per_node=gpus)
    progress("reading the configuration")
    job = configs.resolve(spec, options)
    if options.get("engine") == "rehearse":
        return rehearse_stand_in(job, env, options, progress)
    timing = {"parse": time.perf_counter() - started}
    return predict(job, progress, timing, use_cache=not options.get("no_cache"), advise=advise)


def predict(
    job: JobSpec, progress: Progress = lambda text: None, timing: Mapping[str, float] | None = None, use_cache: bool = True,
    advise: bool = True,
) -> Outcome:  # fmt: skip
    """The verdict on a job, with advice when it does not fit."""
    simulator = Simulator(job, progress, use_cache)
    try:
        verdict = simulator.at_lengths(simulator.simulate(job, timing))
    except Unpredictable as e:
        return _unknown(job, simulator.budget, e)
    if verdict.verdict != "exceeds" or not advise:
        return Outcome(verdict)
    progress("looking for changes that fit")
    return Outcome(verdict, tuple(advice.advise(verdict, simulator.simulate)))


def _unknown(job: JobSpec, budget: DeviceBudget, e: Unpredictable) -> Outcome:
    return Outcome(unknown_verdict(job, budget, " - ".join(x for x in (e.message, e.where, e.help) if x)))


UNLIMITED_BYTES = 1 << 44  # a card that nothing fills, to see what a job that died would have needed
REHEARSAL_DEFAULTS = {"steps": 2, "time_limit": 600.0}


def rehearse(argv: Sequence[str], env: Mapping[str, str], cwd: str, options: Mapping[str, Any], progress: Progress) -> Outcome:
    """Run the launch command's script on virtual cards, some steps, some ranks. This executes the user's code.
    options: those of `launchguard rehearse`. Raises InputError, NotTold where a rehearsal is not possible here."""
    spec = launch.parse(argv, env, cwd, gpus_per_node=configs.gpus_per_node(options, cwd))
    job, known = _job_of(spec, options)
    if not known:
        job = dataclasses.replace(job, device=options.get("device") or "auto")
    job = dataclasses.replace(job, headroom=options.get("headroom") or "0%")
    return _rehearse(job, spec, known, env, options, progress)


def rehearse_stand_in(job: JobSpec, env: Mapping[str, str], options: Mapping[str, Any], progress: Progress) -> Outcome:
    """The job of the configuration, run on virtual cards with launchguard's own script and synthetic batches."""
    from launchguard.rehearsal.stand_in import stand_in

    options = {**REHEARSAL_DEFAULTS, "random_weights": True, **options}
    with tempfile.TemporaryDirectory(prefix="launchguard-stand-in-") as folder:
        try:
            spec = stand_in(job, options["steps"], Path(folder))
        except Unpredictable as e:
            return _unknown(job, find_device(job.device, job.headroom)[1], e)
        return _rehearse(job, spec, True, env, options, progress)


def _rehearse(
    job: JobSpec, spec: LaunchSpec, known: bool, env: Mapping[str, str], options: Mapping[str, Any], progress: Progress
) -> Outcome:  # fmt: skip
    from launchguard.rehearsal import build, run, target
    from launchguard.trace.cache import cache_dir

    profile, budget = find_device(job.device, job.headroom)
    ranks = run.distinct_ranks(spec, options.get("ranks"))
    progress("preparing the virtual card")
    environment = target.find_target(run.interpreter(options.get("python")))
    plan = run.Plan(
        launch=spec, device=profile, total_bytes=budget.budget_bytes, ranks=ranks, python=environment.python,
        stubs=build.build(environment, cache_dir()), steps=options["steps"], through_save=options.get("through") == "save",
        time_limit=options["time_limit"], jobs=options.get("jobs") or run.default_jobs(ranks),
        random_weights=bool(options.get("random_weights")), padding=bool(options.get("padding")),
        allow_network=bool(options.get("allow_network")),
        communicator_bytes=communicator_bytes(spec.world_size, spec.nproc_per_node, profile).nbytes if spec.world_size > 1 else 0,
    )  # fmt: skip
    records = run.run(plan, env, progress)
    died = tuple(record.rank for record in records if record.result == "oom")
    without_limit = run.run(dataclasses.replace(plan, total_bytes=UNLIMITED_BYTES, ranks=died), env, progress) if died else ()
    unlimited = {record.rank: record for record in without_limit}
    who = "the stand-in" if options.get("engine") == "rehearse" else "the script"
    verdict = rehearsed.judge_records(job, records, unlimited, profile, budget, known, who)
    return Outcome(verdict, _advice_after(verdict, job, progress) if verdict.verdict == "exceeds" and known else ())


def _job_of(spec: LaunchSpec, options: Mapping[str, Any]) -> tuple[JobSpec, bool]:
    """The job as the configuration describes it, and whether it could be read: a rehearsal needs no more than the launch."""
    try:
        return configs.resolve(spec, options), True
    except LaunchguardError as e:
        note = Note("LG125", "info", f"the configuration was not read ({e.message}), so settings are not named here", e.where)
        return JobSpec(launch=spec, model=ModelSpec("the script's own"), notes=(*spec.notes, note)), False


def _advice_after(verdict: Verdict, job: JobSpec, progress: Progress) -> tuple[Advice, ...]:
    """What helps, by the trace engine; nothing where that cannot tell."""
    progress("looking for changes that fit")
    try:
        return tuple(advice.advise(verdict, Simulator(job).simulate))
    except LaunchguardError:
        return ()


class Simulator:
    """simulate(job) -> Verdict on one device; micro-batches that were traced once are kept, so advice is cheap."""

    def __init__(self, job: JobSpec, progress: Progress = lambda text: None, use_cache: bool = True) -> None:
        self.progress, self.use_cache = progress, use_cache
        environ = {**os.environ, **job.launch.environment}
        self.profile, self.budget = find_device(job.device, job.headroom, job.device_used, environ, job.device_share)
        self._traces: dict[str, StepTrace] = {}

    def simulate(self, job: JobSpec, timing: Mapping[str, float] | None = None) -> Verdict:
        started = time.perf_counter()
        trace = self._trace(job)
        traced = time.perf_counter()
        self.progress("simulating ranks")
        job = strategies.with_notes(job)
        schedules = strategies.schedules(job, trace, self.profile)
        verdict = judge(job, trace, schedules, self.profile, self.budget)
        seconds = {**(timing or {}), "trace": traced - started, "simulate": time.perf_counter() - traced}
        return dataclasses.replace(verdict, timing_seconds={k: round(v, 3) for k, v in seconds.items()})

    def at_lengths(self, verdict: Verdict) -> Verdict:
        """The verdict, which is on the longest batch, with those on shorter ones where lengths are given."""
        spec = verdict.job.lengths
        if spec is None:
            return verdict
        found: dict[int, LengthPrediction] = {}
        for label, tokens in spec.batch_tokens:
            at = verdict if tokens == verdict.job.seq_len else None
            if tokens not in found:
                self.progress(f"predicting at {tokens} tokens ({label})")
                found[tokens] = length_prediction(label, tokens, at or self.simulate(verdict.job.changed({"seq_len": tokens})))
        return with_lengths(verdict, [dataclasses.replace(found[tokens], label=label) for label, tokens in spec.batch_tokens])

    def _trace(self, job: JobSpec) -> StepTrace:
        from launchguard import trace  # imports no torch itself; its worker process does

        wanted = {request.key(): request for request in trace.requests_of(job, self.profile)}
        missing = [key for key in wanted if key not in self._traces]
        traced = trace.trace_requests([wanted[key] for key in missing], self.progress, self.use_cache)
        self._traces.update(zip(missing, traced))
        return trace.joined([self._traces[key] for key in wanted])


def find_device(
    name: str, headroom: str, used: str = "0", environ: Mapping[str, str] | None = None, share: float = 0.0
) -> tuple[DeviceProfile, DeviceBudget]:  # fmt: skip
    """A device by name or size, the smallest where several are named; "auto": this node's GPUs through NVML, the one with the least free
    memory of those that CUDA_VISIBLE_DEVICES leaves (environ: the job's). used: what other processes
    hold of it; share: what an engine in the job's own processes takes of it."""
    held = _size(used)
    if name != "auto":
        named = [device(part.strip()) for part in name.split(",") if part.strip()]
        profile = min(named, key=lambda d: d.total_bytes)
        others = {d.name for d in named} - {profile.name}
        source = f"the smallest of the job's cards ({', '.join(sorted(others))} beside it); {profile.source}" if others else profile.source
        held += int(share * profile.total_bytes)
        if not held:
            return profile, device_budget(profile, headroom, source=source)
        return profile, device_budget(profile, headroom, profile.total_bytes - held, f"{gib(held)} in use by others; {source}")
    found = detect(environ)
    if not found:
        raise NotTold("no GPU is visible here, so the device of the job is not known", where="--device auto",
                      help="name it: --device H100-80GB (launchguard devices lists them), or device: in launchguard.yaml")  # fmt: skip
    smallest = min(found, key=lambda d: d.free_bytes)
    held += int(share * smallest.profile.total_bytes)
    in_use = max(0, smallest.profile.total_bytes - smallest.free_bytes)
    source = f"NVML: free on GPU {smallest.index}" + (f", {gib(in_use)} in use there" if in_use else "")
    return smallest.profile, device_budget(smallest.profile, headroom, smallest.free_bytes - held, source)


def _size(text: str) -> int:
    try:
        return parse_bytes(text) if text != "0" else 0
    except ValueError:
        raise InputError(f"not a size: {text!r}", where="--device-used", help="e.g. 3GiB") from None
