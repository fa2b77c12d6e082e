"""Which GPUs ranks get: CUDA_VISIBLE_DEVICES, gpu_ids, --include, and the node's number of them."""

from __future__ import annotations

import pytest

from launchguard import launch
from launchguard.errors import InputError
from launchguard.job import LaunchSpec


def parse(line: str, gpus: int | None = None, **env: str) -> LaunchSpec:
    return launch.parse(line.split(), {"HOME": "/nonexistent", **env}, "/", gpus)


def codes(line: str, gpus: int | None = None, **env: str) -> list[str]:
    return [note.code for note in parse(line, gpus, **env).notes]


def test_renumbered_gpus_are_told() -> None:
    assert codes("torchrun --nproc_per_node 2 t.py", CUDA_VISIBLE_DEVICES="2,5") == ["LG240"]
    assert codes("torchrun --nproc_per_node 2 t.py", CUDA_VISIBLE_DEVICES="0,1,2") == []
    assert codes("deepspeed --include localhost:3,5 t.py") == ["LG240"]
    assert codes("deepspeed --num_gpus 2 t.py") == []
    note = parse("deepspeed --include localhost:3,5 t.py").notes[0]
    assert "GPU 0 is 3, 1 is 5" in note.message and "--include" in note.origin


@pytest.mark.parametrize(
    "line, gpus, visible",
    [
        ("torchrun --nproc_per_node 4 t.py", None, "0,1"),
        ("torchrun --nproc_per_node 4 t.py", 2, ""),
        ("deepspeed --num_gpus 4 t.py", 2, ""),
    ],
)
def test_more_processes_than_gpus(line: str, gpus: int | None, visible: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(line, gpus, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert caught.value.code in ("LG249", "LG260")


def test_an_empty_variable_hides_only_the_gpus_of_this_machine() -> None:
    assert codes("torchrun --nproc_per_node 4 t.py", CUDA_VISIBLE_DEVICES="") == []


def test_deepspeed_takes_the_variable_as_include() -> None:
    spec = parse("deepspeed t.py", 4, CUDA_VISIBLE_DEVICES="0,2")
    assert spec.world_size == 2 and spec.environment["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert [(note.code, note.origin) for note in spec.notes] == [("LG240", "environment:CUDA_VISIBLE_DEVICES")]
    with pytest.raises(InputError, match="slot '2'") as caught:
        parse("deepspeed t.py", 2, CUDA_VISIBLE_DEVICES="0,2")
    assert caught.value.code == "LG260"


def test_the_variable_narrows_the_node() -> None:
    assert parse("torchrun --nproc_per_node gpu t.py", 8, CUDA_VISIBLE_DEVICES="4,5").world_size == 2
    assert parse("python t.py", 8, CUDA_VISIBLE_DEVICES="0").gpus_in_sight == 1
    assert parse("accelerate launch t.py", 8, CUDA_VISIBLE_DEVICES="0,1,2").world_size == 3


def test_one_process_on_a_node_of_many_gpus() -> None:
    (note,) = parse("torchrun t.py", 8).notes
    assert (note.code, note.severity) == ("LG215", "warning") and "8 GPUs" in note.message
    assert parse("torchrun --nproc_per_node 1 t.py", 8).notes[0].severity == "info"
    for line, gpus, env in (("torchrun t.py", 8, {"CUDA_VISIBLE_DEVICES": "0"}), ("torchrun t.py", None, {}), ("python t.py", 8, {})):
        assert "LG215" not in [note.code for note in parse(line, gpus, **env).notes]
