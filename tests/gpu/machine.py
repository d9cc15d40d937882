"""Describe the devices of this machine, and the packages that are installed."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["OPTIONAL_PACKAGES", "Device", "Machine", "describe", "missing_packages"]

OPTIONAL_PACKAGES = {
    "transformers": "parity of Hugging Face models",
    "torchao": "float8",
    "pytest": "the tests of tests/parity",
    "torchdata": "nothing here",
    "mlflow": "nothing here",
    "jsonargparse": "nothing here",
}
"""Packages that may be missing, with what is left out without them."""


@dataclass(frozen=True)
class Device:
    """Hold what is known of a device."""

    name: str
    memory_gib: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """Hold what decides which checks can run, and what their figures mean.

    Args:
        kind: ``"cuda"``, ``"simulated"`` or ``"cpu"``.
        devices: The devices that processes of this user see; a CPU counts as none.
        versions: Versions by name.
        missing: Names of optional packages that are not installed.
    """

    kind: str
    devices: tuple[Device, ...]
    versions: dict[str, str]
    missing: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the first device, or of the kind of machine."""
        return self.devices[0].name if self.devices else self.kind

    def as_json(self) -> dict[str, Any]:
        """Return the content as plain values."""
        return asdict(self)


def missing_packages() -> tuple[str, ...]:
    """Return the names of the optional packages that are not installed."""
    return tuple(name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is None)


def describe(kind: str) -> Machine:
    """Describe this machine. This initializes CUDA in this process.

    Args:
        kind: ``"cuda"``, ``"simulated"`` or ``"cpu"``.
    """
    import torch

    devices, versions = [], {"Python": platform.python_version(), "torch": torch.__version__}
    for name in ("lightning", "torchmetrics", "triton", *OPTIONAL_PACKAGES):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if kind == "cuda":
        versions["CUDA of torch"] = str(torch.version.cuda)
        versions["cuDNN"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["driver"] = _driver()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = (properties.major, properties.minor)
            devices.append(Device(properties.name, properties.total_memory / 2**30, capability))
    versions["cores"] = str(os.cpu_count())
    versions["commit"] = _commit()
    return Machine(kind, tuple(devices), versions, missing_packages())


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
