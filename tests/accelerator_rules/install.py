"""Register the simulated accelerator with torch, Lightning, and the backend with NCCL's rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from torch import Tensor
from torch.utils import _contextlib

from tests.accelerator_rules import NAME
from tests.accelerator_rules.build import compiled
from tests.accelerator_rules.device_module import device_module
from tests.accelerator_rules.mixed_group import with_gloo
from tests.nccl_rules import memory

__all__ = ["RaceError", "SimulatedAccelerator", "install", "watched"]

_ROOT = Path(__file__).parents[2]


class RaceError(AssertionError):
    """Report operations or copies whose order nothing guarantees."""


class SimulatedAccelerator(Accelerator):
    """Train on the simulated accelerator; all ranks use the device with index 0 of their own process."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing, since there is one device."""

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of devices."""
        return len(devices) if isinstance(devices, list) else int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return the device of each rank."""
        return [torch.device(NAME, 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices of a process."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return that the device exists."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name for ``Trainer(accelerator=...)``."""
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return no statistics."""
        return {}


class _CollectiveDevice(memory.Device):
    """Let the backend send tensors of the device, and order its operations among the streams."""

    type = NAME

    def host(self, tensor: Tensor) -> Tensor:
        return compiled().host(tensor)

    def group_class(self, default: type[Any]) -> type[Any]:
        return with_gloo(default)

    def begin(self, group: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        return compiled().begin_collective(group, list(inputs), list(outputs))

    def wait(self, token: Any) -> None:
        compiled().wait_collective(token)


def install() -> None:
    """Register the device in this process, which must not use another accelerator. Do nothing if it is registered."""
    if hasattr(torch, NAME):
        return
    extension = compiled()
    torch.utils.rename_privateuse1_backend(NAME)
    extension.start()
    packages = [str(_ROOT / "lightning_dist") + "/", str(_ROOT / "plugins") + "/"]
    own = [str(Path(__file__).with_name(f"{name}.py")) for name in ("install", "device_module", "host_waits")]
    extension.set_roots(packages, [str(_ROOT / "tests" / "nccl_rules") + "/", _contextlib.__file__, *own])
    torch._register_device_module(NAME, device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True, unsupported_dtype=[])
    # Module.to replaces the tensors of parameters on this kind of device, and breaks ties, unless it swaps them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    AcceleratorRegistry.register(NAME, SimulatedAccelerator, description="the simulated accelerator")
    memory.use_device(_CollectiveDevice())
    from tests.nccl_rules.backend import install as install_backend

    install_backend()


def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and look for races meanwhile, from a state in which the host has waited for everything.

    Raises:
        RaceError: If there was one.
    """
    extension = compiled()
    # The host sees that an event is reached when it asks for the second to fourth time, depending on the rank.
    extension.set_patience(1 + int(os.environ.get("RANK", "0")) % 3)
    extension.reset()
    extension.enable_races(True)
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        if reports := _end_watching():
            raise _error_of(reports) from error  # Races may be why the values are wrong that raised the error.
        raise
    if reports := _end_watching():
        raise _error_of(reports)
    return result


def _end_watching() -> list[str]:
    compiled().enable_races(False)
    return list(compiled().take_reports())


def _error_of(reports: list[str]) -> RaceError:
    return RaceError(f"{len(reports)} races:\n" + "\n".join(reports))
