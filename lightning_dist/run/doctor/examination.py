"""Run checks in turn on all ranks, and end all of them if one fails or does not answer."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.profile import DeviceFigures, LinkFigures, MachineProfile
from lightning_dist.run.doctor.ranks import Ranks

__all__ = ["Check", "Examination", "ended_after", "examine"]


@dataclass
class Examination:
    """Hold what checks are told, and what they measure besides their findings.

    Args:
        ranks: The ranks that are examined.
        backend: Backend of the process group; empty for a single process.
        checkpoint_folder: Folder or URL to which checkpoints would be written.
        all_pairs: Whether the link of every pair of ranks is measured, and not only that of neighbours.
        devices: Measured figures of the devices of all ranks.
        links: Measured figures of the links.
        versions: Versions of packages on rank 0 by name.
    """

    ranks: Ranks
    backend: str = ""
    checkpoint_folder: str | Path = "."
    all_pairs: bool = False
    devices: list[DeviceFigures] = field(default_factory=list)
    links: list[LinkFigures] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def profile(self) -> MachineProfile:
        """Return what was measured as a profile."""
        num_nodes = len(self.ranks.of_nodes)
        return MachineProfile(self.backend, num_nodes, tuple(self.devices), tuple(self.links), dict(self.versions))


class Check(NamedTuple):
    """Describe a check, which all ranks run together.

    Args:
        name: What is checked, for messages.
        run: Function that checks it, and returns the same findings on all ranks. What it measures, it adds to the
            examination.
        limit_s: Function that returns after how many seconds the check counts as hanging.
    """

    name: str
    run: Callable[[Examination], list[Finding]]
    limit_s: Callable[[Examination], float] = lambda examination: 120.0


def examine(examination: Examination, checks: Sequence[Check]) -> list[Finding]:
    """Run checks in turn, and return their findings. This is a collective over all ranks.

    A check that raises an error on one rank ends that rank, whose lost connection ends the others. A process that does
    not end a check within its limit is ended.

    Args:
        examination: What the checks are told.
        checks: The checks, the same on all ranks.
    """
    findings = []
    for check in checks:
        with ended_after(check.limit_s(examination), f"the check of {check.name}", examination.ranks):
            try:
                findings += check.run(examination)
            except Exception as error:
                error.add_note(f"in the check of {check.name}")
                raise
    return findings


@contextmanager
def ended_after(seconds: float, what: str, ranks: Ranks) -> Iterator[None]:
    """End this process with code 1 if the body of the context takes longer than ``seconds``.

    The body may wait for a device, a disk or another rank in a call that raises no error.

    Args:
        seconds: Seconds that the body may take.
        what: What the body does, for the message.
        ranks: The ranks, for the message.
    """

    def end() -> None:
        sys.stderr.write(
            f"error: {ranks.named([ranks.rank])}: {what} has not ended within {seconds:.0f} s, so that this rank ends."
            " The rank of which no such line is shown, or the device or folder that the check uses, does not answer.\n"
        )
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
