"""Describe what ``lightning-dist launch`` is to start."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.cli.errors import closest
from lightning_dist.mesh.replica_range import ReplicaRange

TRAINER_COMMANDS = ("fit", "validate", "test", "predict", "check", "profile")
"""The commands that train or evaluate, and so run as one process for each device."""

RANK_MODULE = "lightning_dist.cli.launch.rank"
"""The module that a launched process runs."""


@dataclass(frozen=True)
class Job:
    """Describe a run that is to be launched.

    Args:
        words: The words after ``--``: a command of lightning-dist and its options, or a script and its arguments.
        num_nodes: Number of nodes; the largest one, if it may vary.
        num_devices: Number of devices, and of processes, of each node.
        max_restarts: How often the processes are started again after one of them has failed.
        logs: Folder of the processes' output.
        head: Address of the node at which the others meet, ``HOST`` or ``HOST:PORT``, or of the Ray cluster; empty:
            this node.
        on_gpu: Whether the devices are GPUs.
        min_nodes: The smallest number of nodes that the run continues with; None: ``num_nodes``.
        elastic: The smallest and the largest number of replicas that leave and join; None: none do.
    """

    words: tuple[str, ...]
    num_nodes: int
    num_devices: int
    max_restarts: int
    logs: Path
    head: str = ""
    on_gpu: bool = True
    min_nodes: int | None = None
    elastic: ReplicaRange | None = None

    @property
    def nodes(self) -> str:
        """Return the number of nodes, or the smallest and the largest one, as ``MIN:MAX``."""
        return f"{self.num_nodes}" if self.min_nodes is None else f"{self.min_nodes}:{self.num_nodes}"

    @property
    def is_script(self) -> bool:
        """Return whether the job is a Python script of the user's own."""
        return self.words[0].endswith(".py")

    @property
    def resumes(self) -> bool:
        """Return whether the job is a fit that starts from the newest checkpoint of its run."""
        restarts = self.max_restarts > 0 or self.min_nodes is not None or self.elastic is not None
        return self.words[0] == "fit" and restarts and value_of(self.words, "--ckpt_path") is None

    def command(self) -> list[str]:
        """Return the words that run the job after ``lightning-dist``, with the sizes that were asked for."""
        if self.is_script:
            return list(self.words)
        return [
            *self.command_without_sizes(),
            f"--trainer.devices={self.num_devices}",
            f"--trainer.num_nodes={self.num_nodes}",
        ]

    def command_without_sizes(self) -> list[str]:
        """Return the words that run the job, for a launcher on each node that adds the sizes.

        A fit that may be restarted starts from the newest checkpoint of its run, unless its configuration says
        otherwise.
        """
        name, *options = self.words
        return [name, *(["--ckpt_path=auto"] if self.resumes else []), *options]

    def mistake(self) -> str | None:
        """Return what is wrong with the job, and how to mend it; None: nothing."""
        name = self.words[0] if self.words else ""
        if not name:
            return "nothing to launch. Give the command after two hyphens: lightning-dist launch -- fit -c my.yaml"
        if not self.is_script and name not in TRAINER_COMMANDS:
            return (
                f"cannot launch {name!r}{closest(name, TRAINER_COMMANDS)} After the two hyphens stands one of"
                f" {', '.join(TRAINER_COMMANDS)}, or a script whose name ends in .py."
            )
        if self.is_script and not Path(name).is_file():
            return f"there is no script {name!r}."
        for option, size, flag in (
            ("--trainer.devices", self.num_devices, "--devices"),
            ("--trainer.num_nodes", self.num_nodes, "--nodes"),
        ):
            given = value_of(self.words, option)
            if not self.is_script and given is not None and given != str(size):
                return (
                    f"{option}={given}, but {flag} is {size}. Leave {option} out, since launch sets it, or give"
                    f" {flag} {given}."
                )
        return None


@dataclass(frozen=True)
class Launcher:
    """Describe a way of starting a run, one of the values of ``--on``.

    Args:
        start: Function that starts a job with the options of the command, and returns the exit code.
        describe: Function that returns what ``start`` would start, for ``--dry-run``.
        mistake: Function that returns what is wrong with the job or the options, and how to mend it; None: nothing.
        uses: The options of the command that only some launchers use, and that this one does.
    """

    start: Callable[[Job, argparse.Namespace], int]
    describe: Callable[[Job, argparse.Namespace], str]
    mistake: Callable[[Job, argparse.Namespace], str | None]
    uses: tuple[str, ...] = ()


def value_of(words: tuple[str, ...] | list[str], option: str) -> str | None:
    """Return the last value that the words give to an option, as ``OPTION=VALUE`` or ``OPTION VALUE``."""
    value = None
    for index, word in enumerate(words):
        if found := re.fullmatch(rf"{re.escape(option)}=(.*)", word):
            value = found[1]
        elif word == option and index + 1 < len(words):
            value = words[index + 1]
    return value


def endpoint_of(head: str, port: int) -> str:
    """Return ``HOST:PORT`` of an address that may have no port.

    Args:
        head: ``HOST`` or ``HOST:PORT``.
        port: The port that is meant if the address has none.
    """
    return head if re.search(r":\d+$", head) else f"{head}:{port}"


def mistake_of_head(job: Job) -> str | None:
    """Return what is wrong with the address at which nodes meet; None: nothing."""
    if job.head and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:]+)(:\d{1,5})?", job.head):
        return f"--head={job.head!r}: expected HOST or HOST:PORT."
    return None


def python_words(job: Job) -> list[str]:
    """Return the words after ``python`` that run a rank of the job."""
    return ["-m", RANK_MODULE, *job.command()]
