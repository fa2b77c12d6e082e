"""The flow of launchguard, from a launch command to a verdict with advice: the table of contents of the code base."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchguard import advice, configs, launch, rehearsed, strategies
from launchguard.errors import LaunchguardError, NotTold, Unpredictable
from launchguard.events import StepTrace
from launchguard.job import JobSpec, LaunchSpec, ModelSpec, Note
from launchguard.profiles import DeviceProfile, communicator_bytes, detect, device
from launchguard.verdict import Advice, DeviceBudget, Verdict, device_budget, judge, unknown_verdict

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
        verdict = simulator.simulate(job, timing)
    except Unpredictable as e:
        return Outcome(unknown_verdict(job, simulator.budget, " - ".join(x for x in (e.message, e.where, e.help) if x)))
    if verdict.verdict != "exceeds" or not advise:
        return Outcome(verdict)
    progress("looking for changes that fit")
    return Outcome(verdict, tuple(advice.advise(verdict, simulator.simulate)))


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
        return _rehearse(job, stand_in(job, options["steps"], Path(folder)), True, env, options, progress)


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
    verdict = rehearsed.judge_records(job, records, {r.rank: r for r in without_limit}, profile, budget, known)
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
        self.profile, self.budget = find_device(job.device, job.headroom)
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

    def _trace(self, job: JobSpec) -> StepTrace:
        from launchguard import trace  # imports no torch itself; its worker process does

        wanted = {request.key(): request for request in trace.requests_of(job, self.profile)}
        missing = [key for key in wanted if key not in self._traces]
        traced = trace.trace_requests([wanted[key] for key in missing], self.progress, self.use_cache)
        self._traces.update(zip(missing, traced))
        return trace.joined([self._traces[key] for key in wanted])


def find_device(name: str, headroom: str) -> tuple[DeviceProfile, DeviceBudget]:
    """A device by name or size; "auto": this node's GPUs through NVML, the one with the least free memory."""
    if name != "auto":
        profile = device(name)
        return profile, device_budget(profile, headroom)
    found = detect()
    if not found:
        raise NotTold("no GPU is visible here, so the device of the job is not known", where="--device auto",
                      help="name it: --device H100-80GB (launchguard devices lists them), or device: in launchguard.yaml")  # fmt: skip
    smallest = min(found, key=lambda d: d.free_bytes)
    return smallest.profile, device_budget(smallest.profile, headroom, smallest.free_bytes, f"NVML: free on GPU {smallest.index}")
