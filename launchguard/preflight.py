"""The flow of launchguard, from a launch command to a verdict with advice: the table of contents of the code base."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchguard import advice, configs, launch, strategies
from launchguard.errors import NotTold, Unpredictable
from launchguard.events import StepTrace
from launchguard.job import JobSpec
from launchguard.profiles import DeviceProfile, detect, device
from launchguard.verdict import Advice, DeviceBudget, Verdict, device_budget, judge, unknown_verdict

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What `check` found: the verdict, and what would make the job fit when it does not."""

    verdict: Verdict
    advice: tuple[Advice, ...] = ()


def preflight(argv: Sequence[str], env: Mapping[str, str], cwd: str, options: Mapping[str, Any], progress: Progress) -> Outcome:
    """Predict a launch command. Nothing is launched, no file of the user's is written.
    A job that cannot be simulated gives the verdict "unknown". Raises InputError for input that cannot be used."""
    started = time.perf_counter()
    progress("reading the launch command")
    gpus = options.get("gpus_per_node")
    if argv:
        spec = launch.parse(argv, env, cwd, gpus_per_node=gpus)
    else:
        spec = launch.without_command(env, cwd, accelerate_config=options.get("accelerate"), gpus_per_node=gpus)
    progress("reading the configuration")
    job = configs.resolve(spec, options)
    timing = {"parse": time.perf_counter() - started}
    return predict(job, progress, timing, use_cache=not options.get("no_cache"))


def predict(
    job: JobSpec, progress: Progress = lambda text: None, timing: Mapping[str, float] | None = None, use_cache: bool = True
) -> Outcome:
    """The verdict on a job, with advice when it does not fit."""
    simulator = Simulator(job, progress, use_cache)
    try:
        verdict = simulator.simulate(job, timing)
    except Unpredictable as e:
        return Outcome(unknown_verdict(job, simulator.budget, " - ".join(x for x in (e.message, e.where, e.help) if x)))
    if verdict.verdict != "exceeds":
        return Outcome(verdict)
    progress("looking for changes that fit")
    return Outcome(verdict, tuple(advice.advise(verdict, simulator.simulate)))


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
        schedules = strategies.schedules(job, trace, self.profile)
        verdict = judge(job, trace, schedules, self.profile, self.budget)
        seconds = {**(timing or {}), "trace": traced - started, "simulate": time.perf_counter() - traced}
        return dataclasses.replace(verdict, timing_seconds={k: round(v, 3) for k, v in seconds.items()})

    def _trace(self, job: JobSpec) -> StepTrace:
        from launchguard import trace  # imports no torch itself; its worker process does

        request = trace.request_of(job, self.profile)
        key = request.key()
        if key not in self._traces:
            self._traces[key] = trace.trace_request(request, self.progress, self.use_cache)
        return self._traces[key]


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
