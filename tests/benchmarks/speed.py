"""python tests/benchmarks/speed.py [--json OUT] [--runs 3]: how long launchguard takes, as ratios to what it cannot avoid.

Every ratio comes from one run on one machine: whole processes, alternating, the minimum of each. Exits 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LLAMA_8B = Path(__file__).resolve().parents[2] / "examples" / "models" / "llama-3.1-8b"
LIMITS = {"cold": 2.0, "cached": 1.3, "many_ranks": 1.5}
MAX_PEAK_BYTES = 1_500_000_000
MODEL_IMPORT = "import torch; from transformers.models.llama.modeling_llama import LlamaForCausalLM"
PARSER_IMPORT = "from deepspeed.launcher.runner import parse_args"
DS_CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
}


def timed(command: Sequence[str], cwd: Path, env: dict[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


class Bench:
    """A folder with the job's files, and the commands that are timed in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "LAUNCHGUARD_CACHE_DIR": str(folder / "cache"),
            "NO_COLOR": "1",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        (folder / "train.py").write_text("from transformers import Trainer, TrainingArguments\n")
        (folder / "hosts").write_text("".join(f"node{i} slots=8\n" for i in range(2048)))
        self.edits = 0
        self.edit()

    def edit(self) -> None:
        """An edit of the DeepSpeed JSON that changes what is simulated, not what is traced."""
        self.edits += 1
        config = {**DS_CONFIG, "zero_optimization": {**DS_CONFIG["zero_optimization"], "reduce_bucket_size": int(2e8) + self.edits}}
        (self.folder / "ds.json").write_text(json.dumps(config))

    def python(self, code: str) -> float:
        return timed([sys.executable, "-c", code], self.folder, self.env)

    def check(self, *launcher: str, options: Sequence[str] = ()) -> float:
        command = [
            sys.executable,
            "-m",
            "launchguard",
            "check",
            "--device",
            "h100-80-sxm",
            "--quiet",
            *options,
            "--",
            "deepspeed",
            *launcher,
        ]
        script = [
            "train.py",
            "--model_name_or_path",
            str(LLAMA_8B),
            "--deepspeed",
            "ds.json",
            "--bf16",
            "--per_device_train_batch_size",
            "1",
        ]
        return timed([*command, *script, "--gradient_checkpointing", "true", "--max_length", "2048"], self.folder, self.env)

    def cold(self) -> float:
        return self.check("--num_gpus", "8", options=["--no-cache"])

    def cached(self) -> float:
        self.edit()
        return self.check("--num_gpus", "8")

    def many_ranks(self) -> float:
        self.edit()
        return self.check("--hostfile", "hosts")


def pair(first: Callable[[], float], second: Callable[[], float], runs: int) -> tuple[float, float]:
    """Minima of two things timed in turn."""
    times = [(first(), second()) for _ in range(runs)]
    return min(a for a, _ in times), min(b for _, b in times)


def measure(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.python(MODEL_IMPORT)  # files into the page cache
        cold, model_import = pair(bench.cold, lambda: bench.python(MODEL_IMPORT), runs)
        bench.check("--num_gpus", "8")  # fills the trace cache
        cached, parser_import = pair(bench.cached, lambda: bench.python(PARSER_IMPORT), runs)
        many, few = pair(bench.many_ranks, bench.cached, runs)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "seconds": {
            "cold": cold,
            "model_import": model_import,
            "cached": cached,
            "parser_import": parser_import,
            "ranks_16384": many,
            "ranks_8": few,
        },
        "ratios": {"cold": cold / model_import, "cached": cached / parser_import, "many_ranks": many / few},
        "limits": LIMITS,
        "peak_bytes": peak,
        "replay": replay_rate(),
    }


def replay_rate() -> dict[str, float]:
    """Events a second through the allocator alone, on the schedule of an 8B job that is traced here."""
    from launchguard import strategies, trace
    from launchguard.allocator import replay
    from launchguard.job import ActivationCheckpointing, JobSpec, LaunchSpec, ModelSpec, OptimizerSpec, Precision, ZeroSpec
    from launchguard.profiles import device

    job = JobSpec(
        launch=LaunchSpec("deepspeed", (), ".", None, nproc_per_node=8),
        model=ModelSpec("llama", config=json.loads((LLAMA_8B / "config.json").read_text()), use_cache=False),
        loop="trainer", strategy="zero", micro_batch_size=1, seq_len=2048, precision=Precision("bfloat16", "bfloat16", "bfloat16"),
        zero=ZeroSpec(stage=3, dtype="bfloat16"), optimizer=OptimizerSpec("adamw", "deepspeed_fused"),
        activation_checkpointing=ActivationCheckpointing(True),
    )  # fmt: skip
    profile = device("h100-80-sxm")
    traced = trace.trace_job(job, profile, use_cache=False)
    started = time.perf_counter()
    events = strategies.schedules(job, traced, profile)[0].events
    scheduled = time.perf_counter()
    replay(events)
    seconds = time.perf_counter() - scheduled
    return {
        "events": len(events),
        "schedule_seconds": scheduled - started,
        "replay_seconds": seconds,
        "events_per_second": len(events) / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    result = measure(arguments.runs)
    names = {
        "cold": "cold check, Llama-3.1-8B, ZeRO-3, 8 ranks / import of torch and the model's class",
        "cached": "check after an edit of the DeepSpeed JSON / import of the launcher's parser",
        "many_ranks": "16,384 ranks / 8 ranks",
    }
    failed = False
    for key, what in names.items():
        over = result["ratios"][key] > LIMITS[key]
        failed |= over
        print(f"{result['ratios'][key]:5.2f}x  (limit {LIMITS[key]}x{', EXCEEDED' if over else ''})  {what}")
    failed |= result["peak_bytes"] > MAX_PEAK_BYTES
    print(f"{result['peak_bytes'] / 1e9:5.2f} GB (limit 1.5 GB)  peak memory of any process")
    print(f"{result['replay']['events_per_second'] / 1e3:5.0f}k events/s through the allocator ({result['replay']['events']} events)")
    print("seconds: " + ", ".join(f"{k} {v:.2f}" for k, v in result["seconds"].items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
