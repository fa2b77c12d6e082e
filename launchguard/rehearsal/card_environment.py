"""The environment that makes a virtual card, and the one that makes a rank."""

from __future__ import annotations

from collections.abc import Mapping

from launchguard.errors import NotTold
from launchguard.job import LaunchSpec
from launchguard.profiles import DeviceProfile

# (shared memory per multiprocessor, opt-in per block, L2) in bytes by compute capability: CUDA C++ programming guide, table "technical
# specifications per compute capability"; L2 from NVIDIA's architecture whitepapers. Kernels choose their tiles by these.
_BY_CAPABILITY = {
    (7, 0): (98304, 98304, 6 << 20), (7, 5): (65536, 65536, 4 << 20), (8, 0): (167936, 166912, 40 << 20), (8, 6): (102400, 101376, 6 << 20),
    (8, 9): (102400, 101376, 72 << 20), (9, 0): (233472, 232448, 50 << 20), (10, 0): (233472, 232448, 126 << 20),
    (12, 0): (102400, 101376, 96 << 20),
}  # fmt: skip

# Reads from the hub, experiment trackers and telemetry of the job are off; a rehearsal must not report itself as a run.
QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled", "WANDB_DISABLED": "true", "COMET_MODE": "disabled", "MLFLOW_TRACKING_URI": "file:///dev/null",
    "CLEARML_OFFLINE_MODE": "1", "NEPTUNE_MODE": "debug", "TRACKIO_DISABLED": "1",
}  # fmt: skip


def card_environment(device: DeviceProfile, total_bytes: int, count: int) -> dict[str, str]:
    """Variables that the stub libraries read. Raises NotTold for a device that CUDA does not drive."""
    capability = device.compute_capability
    if capability is None:
        raise NotTold(f"{device.name} is not a CUDA device, so its job cannot be rehearsed", where="--device",
                      help="launchguard check predicts it; rehearse takes NVIDIA cards or a size in bytes")  # fmt: skip
    nearest = max((c for c in _BY_CAPABILITY if c <= capability), default=min(_BY_CAPABILITY))
    smem_per_sm, smem_per_block, l2 = _BY_CAPABILITY[nearest]
    values = {
        "NAME": device.name, "TOTAL": total_bytes, "CONTEXT": device.context_bytes, "COUNT": count, "MAJOR": capability[0],
        "MINOR": capability[1], "SMS": device.sms, "THREADS_PER_SM": device.max_threads_per_sm, "SMEM_PER_SM": smem_per_sm,
        "SMEM_PER_BLOCK": smem_per_block, "L2": l2,
    }  # fmt: skip
    return {f"LAUNCHGUARD_CARD_{name}": str(value) for name, value in values.items()}


def rank_environment(launch: LaunchSpec, rank: int) -> dict[str, str]:
    """What the launcher puts into the environment of one rank, beside what LaunchSpec.environment already holds.

    torchrun, and accelerate for several processes: torch 2.13 distributed/elastic/agent/server/local_elastic_agent.py;
    deepspeed: 0.19.8 launcher/launch.py:main. A lone `python` or single-process `accelerate launch` gets none.
    """
    if launch.launcher == "python" or (launch.world_size == 1 and launch.launcher == "accelerate"):
        return {}
    local, node = rank % launch.nproc_per_node, rank // launch.nproc_per_node
    values = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": launch.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    if launch.launcher == "deepspeed":
        values |= {"LOCAL_SIZE": launch.nproc_per_node, "CROSS_RANK": node, "CROSS_SIZE": launch.nnodes}
    else:
        values |= {
            "LOCAL_WORLD_SIZE": launch.nproc_per_node, "GROUP_RANK": node, "GROUP_WORLD_SIZE": launch.nnodes, "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": launch.world_size, "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "rehearsal",
        }  # fmt: skip
    if launch.world_size > 1:
        values.setdefault("OMP_NUM_THREADS", 1)
    return {name: str(value) for name, value in values.items()}


def script_arguments(launch: LaunchSpec, rank: int) -> list[str]:
    """The script's arguments, with the --local_rank=N that DeepSpeed's launcher puts in front (launcher/launch.py:main)."""
    setting = launch.arguments.get("no_local_rank")
    if launch.launcher == "deepspeed" and not (setting is not None and setting.value):
        return [f"--local_rank={rank % launch.nproc_per_node}", *launch.script_args]
    return list(launch.script_args)


def contained(env: Mapping[str, str], allow_network: bool) -> dict[str, str]:
    """A copy of the caller's environment with trackers off and the hub offline, unless the network is allowed."""
    quiet = {k: v for k, v in QUIET.items() if not (allow_network and k.endswith("_OFFLINE"))}
    return {**env, **quiet, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
