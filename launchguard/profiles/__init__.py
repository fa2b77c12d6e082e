"""Data about what launchguard cannot run here: devices, optimizers, communication libraries, defaults of absent libraries.

Everything is YAML, one file per X, each with its `source`; a file is parsed when it is asked for.
"""

from launchguard.profiles.communication import CommunicatorBytes, communicator_bytes
from launchguard.profiles.detect import DetectedDevice, detect
from launchguard.profiles.device_profile import DeviceProfile, device, devices
from launchguard.profiles.host_memory import host_memory
from launchguard.profiles.library_defaults import LibraryDefaults, library_defaults
from launchguard.profiles.optimizer_profile import (
    OptimizerProfile,
    StateTensor,
    Temporaries,
    optimizer,
    optimizers,
    state_bytes,
    state_tensors,
    temporary_bytes,
)

__all__ = [
    "CommunicatorBytes",
    "DetectedDevice",
    "DeviceProfile",
    "LibraryDefaults",
    "OptimizerProfile",
    "StateTensor",
    "Temporaries",
    "communicator_bytes",
    "detect",
    "device",
    "devices",
    "host_memory",
    "library_defaults",
    "optimizer",
    "optimizers",
    "state_bytes",
    "state_tensors",
    "temporary_bytes",
]
