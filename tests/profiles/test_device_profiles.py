from __future__ import annotations

import dataclasses
import re
import sys
import types

import pytest

from launchguard.errors import InputError
from launchguard.profiles import DeviceProfile, communicator_bytes, detect, device, devices
from launchguard.profiles.detect import visible_indices
from launchguard.units import GIB, MIB

ALL = devices()


def test_every_listed_card_is_there() -> None:
    assert len(ALL) == 56 and len({profile.name for profile in ALL}) == 56


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.id)
def test_profile(profile: DeviceProfile) -> None:
    assert device(profile.id) is profile and device(profile.name) is profile
    assert all(device(alias) is profile for alias in profile.aliases)
    assert 7 * GIB < profile.total_bytes < 300 * GIB
    assert 0 < profile.context_low < profile.context_bytes < profile.context_high < 2 * GIB
    assert (profile.compute_capability is None) == (profile.vendor != "nvidia")
    assert profile.sms > 0 and profile.max_threads_per_sm in (1024, 1536, 2048)
    assert communicator_bytes(2, 2, profile).nbytes > 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100-80GB", "h100-80-sxm"),
        ("A100 80GB", "a100-80-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-80-sxm"),
        ("rtx4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("Tesla T4", "t4"),
        ("tesla v100-sxm2-32gb", "v100-32"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("  h200 ", "h200"),
    ],
)
def test_spellings(name: str, key: str) -> None:
    assert device(name).id == key


def test_compute_capability_decides_workspace_and_threads() -> None:
    t4, a100, h100, ada = device("t4"), device("a100-80-sxm"), device("h100"), device("rtx4090")
    assert [d.max_threads_per_sm for d in (t4, a100, h100, ada)] == [1024, 2048, 2048, 1536]
    assert [d.cublas_workspace_bytes for d in (t4, a100, h100, ada)] == [8_519_680, 8_519_680, 32 * MIB, 8_519_680]


def test_context_is_the_bare_one_and_its_kernels() -> None:
    a100 = device("a100-80-sxm")  # 0.48 GiB bare; public runs end at 0.52
    assert a100.context_low == int(0.48 * GIB)
    assert a100.context_bytes == pytest.approx(0.63 * GIB, abs=2)


def test_size_as_device() -> None:
    anonymous = device("24GiB")
    assert (anonymous.total_bytes, anonymous.compute_capability) == (24 * GIB, (8, 0))
    assert device("80GB").total_bytes == 80 * 10**9


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("H10O", "nearest: h100"),
        ("A100", "a100-40-pcie, a100-40-sxm"),
        ("rtx", "unknown device 'rtx'"),
        ("RTX 3060 Ti", "unknown device 'RTX 3060 Ti'"),  # and not 3060 tebibytes
        ("100MiB", "smaller than its own"),
        ("5", "unknown"),
    ],
)
def test_unknown(name: str, fact: str) -> None:
    with pytest.raises(InputError, match=re.escape(fact)) as error:
        device(name)
    assert "launchguard devices" in error.value.help


def test_communicator_bytes() -> None:
    a100, h100, consumer = device("a100-80-sxm"), device("h100"), device("rtx3090")
    assert communicator_bytes(1, 8, h100)[:3] == (0, 0, 0)
    assert communicator_bytes(4, 4, a100).nbytes == 688_000_000  # nccl issue 964
    assert communicator_bytes(2, 4, a100).nbytes == 544_000_000
    assert communicator_bytes(8, 8, h100).nbytes == 688_000_000 + 256 * MIB  # NVLS
    assert communicator_bytes(16, 8, a100).nbytes > communicator_bytes(8, 8, a100).nbytes
    assert communicator_bytes(2, 2, consumer).nbytes < communicator_bytes(2, 2, a100).nbytes
    for world in (2, 8, 64):
        nbytes, low, high, source = communicator_bytes(world, 8, h100)
        assert low < nbytes < high and source


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("0, 2", [0, 2]),
        ("", []),
        ("-1", []),
        ("1,9,0", [1]),
        ("1,1", []),
        ("GPU-b", [1]),
        ("GPU-", []),
    ],
)
def test_visible_devices(setting: str | None, expected: list[int]) -> None:
    assert visible_indices(setting, ["GPU-aa", "GPU-bb", "GPU-cc"]) == expected


class FakeNvml(types.ModuleType):
    """Two cards: one with a profile, one that nobody has heard of."""

    NVMLError = RuntimeError
    cards = (("NVIDIA H100 80GB HBM3", 81559 * MIB, 70 * GIB, (9, 0)), (b"NVIDIA Z9000", 100 * GIB, 90 * GIB, (13, 0)))

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.cards[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=self.cards[handle][1], free=self.cards[handle][2])

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.cards[handle][3]


def test_detect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    known, unlisted = detect({})
    assert (known.profile.id, known.profile.total_bytes, known.free_bytes) == ("h100-80-sxm", device("h100").total_bytes, 70 * GIB)
    assert (unlisted.profile.id, unlisted.profile.compute_capability) == ("NVIDIA Z9000", (13, 0))
    assert unlisted.profile.cublas_workspace_bytes == 32 * MIB and unlisted.profile.total_bytes == 100 * GIB
    assert [found.index for found in detect({"CUDA_VISIBLE_DEVICES": "1"})] == [1]


def test_detect_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("no driver")

    monkeypatch.setitem(sys.modules, "pynvml", Broken("pynvml"))
    assert detect() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect() == []


def test_profiles_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        device("t4").sms = 1  # type: ignore[misc]
