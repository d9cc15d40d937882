"""Find out how fast the devices of a plan are, from what is given."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from lightning_dist.plugins.planning.figures import DeviceSpeed, Links
from lightning_dist.plugins.planning.operation_times import measured_seconds
from lightning_dist.plugins.planning.step_time import Where
from lightning_dist.run.doctor.devices import device_name, num_cores
from lightning_dist.run.doctor.profile import MachineProfile
from lightning_dist.run.simulation import Operation

__all__ = ["find_where"]


def find_where(
    num_devices: int, backend: str, device: str | None = None, profile: MachineProfile | None = None
) -> Callable[[Collection[Operation]], Where] | None:
    """Return a function that gives the speed of the devices of a plan, for the operations of its layouts.

    Args:
        num_devices: Number of devices of a node.
        backend: Backend of the process groups, ``"gloo"`` for CPUs and ``"nccl"`` for GPUs.
        device: Name of a device that need not be here, a key of :data:`DEVICES`; None: that of this machine, whose
            operations are measured, or of ``profile``, if it was made on another machine.
        profile: What was measured of the machines; None: the speed of links is assumed.

    Returns:
        The function; None: nothing is known of the devices, because they are GPUs, and there is none here.

    Raises:
        ValueError: If ``device`` is unknown, or ``profile`` has no links.
    """
    here = torch.device("cpu" if backend == "gloo" else "cuda")
    is_here = backend == "gloo" or torch.cuda.is_available()
    links = Links.assumed(device or (device_name(here) if is_here else ""), backend)
    if profile is not None and (profile.links or num_devices > 1):
        links = Links.from_profile(profile)
    if device is not None:
        speed = DeviceSpeed.from_data_sheet(device)
        return lambda operations: Where(num_devices, speed, links)
    if profile is not None:
        reason = profile.why_other_machine(socket.gethostname(), device_name(here)) if is_here else "There is no GPU."
        if reason is not None:
            warnings.warn(f"{reason} The plan is made for the devices of the profile.", stacklevel=2)
            return lambda operations: Where(num_devices, DeviceSpeed.from_profile(profile), links)
    return _Measured(here, num_devices, links) if is_here else None


class _Measured:
    """Measure operations on the device of this machine, each once.

    Args:
        here: The device on which operations are measured.
        num_devices: Number of devices of a node.
        links: The speed of links.
    """

    def __init__(self, here: torch.device, num_devices: int, links: Links) -> None:
        self._here = here
        self._num_devices = num_devices
        self._links = links
        self._speed = DeviceSpeed.of(here)

    def __call__(self, operations: Collection[Operation]) -> Where:
        """Return the speed of the devices for ``operations``."""
        at_once = min(self._num_devices, num_cores())
        new = [operation for operation in operations if operation not in self._speed.measured]
        measured = {**self._speed.measured, **measured_seconds(new, self._here, at_once)}
        self._speed = replace(self._speed, measured=measured)
        return Where(self._num_devices, self._speed, self._links)
