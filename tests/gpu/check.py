"""Define what a check is, what it needs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.machine import Machine

__all__ = ["CUDA", "NO_SIMULATION", "Check", "Found", "Need", "capability", "devices", "memory_gib", "package"]


@dataclass(frozen=True)
class Need:
    """State a condition that a machine must meet for a check to run.

    Args:
        reason: Why the check is left out where the condition is not met.
        is_met: Function that judges a machine.
    """

    reason: str
    is_met: Callable[[Machine], bool]


CUDA = Need("the check needs a CUDA device", lambda machine: machine.kind == "cuda")
NO_SIMULATION = Need("a simulated device does not run it", lambda machine: machine.kind != "simulated")


def package(name: str) -> Need:
    """Need an installed package."""
    return Need(f"{name} is not installed", lambda machine: name not in machine.missing)


def devices(number: int) -> Need:
    """Need several devices, one for each rank; a machine with fewer has ranks share one in another section."""
    return Need(f"the check needs {number} devices", lambda machine: len(machine.devices) >= number)


def memory_gib(number: float) -> Need:
    """Need a device with memory; a machine without devices runs smaller models and so meets it."""
    return Need(
        f"the check needs {number:.0f} GiB of device memory",
        lambda machine: not machine.devices or machine.devices[0].memory_gib >= number,
    )


def capability(major: int, minor: int) -> Need:
    """Need a CUDA device of a compute capability; other kinds of machines meet it by emulation."""
    return Need(
        f"the device's compute capability is below {major}.{minor}",
        lambda machine: not machine.devices or machine.devices[0].capability >= (major, minor),
    )


@dataclass(frozen=True)
class Found:
    """Hold what a check has found.

    Args:
        figure: A few words with the most important number, for the check's line.
        is_met: Whether the bound of the figure is met; True if there is none.
        details: Further lines.
    """

    figure: str = ""
    is_met: bool = True
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """Describe a check.

    Args:
        name: Name by which it is selected, unique in the table.
        section: Heading under which it is shown.
        run: Function at module level, called with the :class:`~tests.gpu.ranks.Ranks` of the check and ``args``.
        args: Further arguments of ``run``.
        needs: What the machine must have.
        limit_s: Time in seconds that it may take.
        is_alone: Whether it gets new processes, because what other checks have left in one would change its figures.
        spreads: Whether each rank has a device of its own; otherwise all ranks are on the first one.
    """

    name: str
    section: str
    run: Callable[..., Found]
    args: tuple[Any, ...] = ()
    needs: tuple[Need, ...] = ()
    limit_s: float = 120.0
    is_alone: bool = False
    spreads: bool = field(default=False)

    def reason_to_leave_out(self, machine: Machine) -> str | None:
        """Return the first need that the machine does not meet, or None."""
        return next((need.reason for need in self.needs if not need.is_met(machine)), None)
