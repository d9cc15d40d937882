"""Describe what ``lightning-dist launch`` is to start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.cli.errors import closest

TRAINER_COMMANDS = ("fit", "validate", "test", "predict", "check", "profile")
"""The commands that train or evaluate, and so run as one process for each device."""

RANK_MODULE = "lightning_dist.cli.launch.rank"
"""The module that a launched process runs."""


@dataclass(frozen=True)
class Job:
    """Describe a run that is to be launched.

    Args:
        words: The words after ``--``: a command of lightning-dist and its options, or a script and its arguments.
        num_nodes: Number of nodes.
        num_devices: Number of devices, and of processes, of each node.
        max_restarts: How often the processes are started again after one of them has failed.
        logs: Folder of the processes' output.
        head: Address of the node at which the others meet, ``HOST`` or ``HOST:PORT``; empty: this node.
        on_gpu: Whether the devices are GPUs.
    """

    words: tuple[str, ...]
    num_nodes: int
    num_devices: int
    max_restarts: int
    logs: Path
    head: str = ""
    on_gpu: bool = True

    @property
    def is_script(self) -> bool:
        """Return whether the job is a Python script of the user's own."""
        return self.words[0].endswith(".py")

    @property
    def resumes(self) -> bool:
        """Return whether the job is a fit that starts from the newest checkpoint of its run."""
        return self.words[0] == "fit" and self.max_restarts > 0 and value_of(self.words, "--ckpt_path") is None

    def command(self) -> list[str]:
        """Return the words that run the job after ``lightning-dist``, with the sizes that were asked for.

        A fit that may be restarted starts from the newest checkpoint of its run, unless its configuration says
        otherwise.
        """
        name, *options = self.words
        if self.is_script:
            return [name, *options]
        resume = ["--ckpt_path=auto"] if self.resumes else []
        sizes = [f"--trainer.devices={self.num_devices}", f"--trainer.num_nodes={self.num_nodes}"]
        return [name, *resume, *options, *sizes]

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


def value_of(words: tuple[str, ...] | list[str], option: str) -> str | None:
    """Return the last value that the words give to an option, as ``OPTION=VALUE`` or ``OPTION VALUE``."""
    value = None
    for index, word in enumerate(words):
        if found := re.fullmatch(rf"{re.escape(option)}=(.*)", word):
            value = found[1]
        elif word == option and index + 1 < len(words):
            value = words[index + 1]
    return value


def python_words(job: Job) -> list[str]:
    """Return the words after ``python`` that run a rank of the job."""
    return ["-m", RANK_MODULE, *job.command()]
