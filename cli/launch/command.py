"""Run ``lightning-dist launch``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error
from lightning_dist.cli.launch import slurm, torchrun
from lightning_dist.cli.launch.job import TRAINER_COMMANDS, Job, value_of

_DESCRIPTION = """\
Start a run on the devices of this node, on several nodes, or as a job of SLURM. What follows the two hyphens is a
command of lightning-dist that trains or evaluates, or a script of your own. The output of each rank is kept in a file,
that of rank 0 is printed as well, and after a failure the error of the rank that failed first is printed.
"""
_EXAMPLES = """\
examples:
  lightning-dist launch --devices 8 --max-restarts 3 -- fit -c my.yaml
  lightning-dist launch --on torchrun --nodes 2 --devices 8 --head node1 -- fit -c my.yaml     (on both nodes)
  lightning-dist launch --on slurm --nodes 2 --devices 8 --sbatch partition=gpu --sbatch time=8:00:00 -- fit -c my.yaml
  lightning-dist launch --on slurm --nodes 2 --devices 8 --dry-run -- fit -c my.yaml           (prints the script)

exit codes: those of the command that is launched; 2 for bad arguments
"""


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist launch``.

    Args:
        arguments: Words of the command line after ``launch``.

    Returns:
        The exit code of the run, or 2 for bad arguments.
    """
    words = list(arguments)
    own, words = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options, rest = make_parser().parse_known_args(own)
    if rest:
        command = next((word for word in rest if word in TRAINER_COMMANDS or word.endswith(".py")), None)
        if command is None or words:
            make_parser().error(f"unrecognized arguments: {rest[0]}")
        print_error(f"lightning-dist launch: write two hyphens before {command!r}: lightning-dist launch -- {command}")
        return BAD_CONFIGURATION
    job = Job(
        words=tuple(words),
        num_nodes=options.nodes,
        num_devices=options.devices or 0,
        max_restarts=options.max_restarts,
        logs=Path(options.logs or time.strftime("launch/%Y%m%d-%H%M%S")).absolute(),
        head=options.head,
        on_gpu=_on_gpu(options, words),
    )
    mistake = _mistake(options, job) or job.mistake()
    if mistake is not None:
        print_error(f"lightning-dist launch: {mistake}")
        return BAD_CONFIGURATION
    if job.resumes:
        print(
            "launch: --ckpt_path=auto is added, because the run may be restarted: each start continues from the newest"
            " checkpoint.",
            file=sys.stderr,
        )
    return LAUNCHERS[options.on](job, options)


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(
        prog="lightning-dist launch",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        usage="lightning-dist launch [options] -- COMMAND [options of the command]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--on", choices=tuple(LAUNCHERS), default="local", help="who starts the processes (local)")
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="number of nodes (1)")
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices of each node")
    parser.add_argument(
        "--accelerator",
        choices=("cpu", "gpu"),
        help="what SLURM is asked for (GPUs, unless the command has --trainer.accelerator=cpu)",
    )
    parser.add_argument(
        "--max-restarts", metavar="N", type=int, default=0, help="how often a run that failed starts again (0)"
    )
    parser.add_argument(
        "--head", metavar="HOST[:PORT]", default="", help="the node at which the nodes of a run by torchrun meet"
    )
    parser.add_argument("--logs", metavar="DIR", help="folder of the output of the ranks (launch/DATE-TIME)")
    parser.add_argument(
        "--sbatch",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="further option of sbatch: time=8:00:00",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command or the script, and start nothing")
    return parser


def _mistake(options: argparse.Namespace, job: Job) -> str | None:
    """Return what is wrong with the options, and how to mend it; None: nothing."""
    for name, smallest in (("nodes", 1), ("max_restarts", 0)):
        if getattr(options, name) < smallest:
            return f"--{name.replace('_', '-')}={getattr(options, name)}: expected at least {smallest}."
    if options.devices is None or options.devices < 1:
        given = "" if options.devices is None else f"={options.devices}"
        return f"--devices{given}: give the number of devices of each node, at least 1."
    if options.on == "local" and job.num_nodes > 1:
        return (
            f"--nodes={job.num_nodes}, but --on=local starts the processes of this node alone. Give --on torchrun"
            " --head HOST and start the command on each node, or --on slurm."
        )
    if options.on == "torchrun" and job.num_nodes > 1 and not job.head:
        return f"--nodes={job.num_nodes} needs --head HOST, the name or address of one of the nodes, on each node."
    if job.head and options.on != "torchrun":
        return f"--head={job.head} belongs to --on torchrun; --on={options.on} does not use it. Leave it out."
    if job.head and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:]+)(:\d{1,5})?", job.head):
        return f"--head={job.head!r}: expected HOST or HOST:PORT."
    if options.sbatch and options.on != "slurm":
        return f"--sbatch={options.sbatch[0]} belongs to --on slurm; --on={options.on} does not use it. Leave it out."
    if options.accelerator and options.on != "slurm":
        return (
            f"--accelerator={options.accelerator} is what SLURM is asked for; --on={options.on} does not use it. Give"
            f" --trainer.accelerator={options.accelerator} after the two hyphens."
        )
    if options.on == "slurm" and any(character.isspace() for character in str(job.logs)):
        return f"--logs={str(job.logs)!r}: SLURM reads no spaces in the names of folders. Give another folder."
    for option in options.sbatch:
        if option.startswith("-") or any(character.isspace() for character in option.partition("=")[0]):
            return f"--sbatch={option!r}: expected NAME=VALUE without hyphens before it, such as time=8:00:00."
    if Path(options.logs or ".").is_file():
        return f"--logs={options.logs!r} is a file. Give a folder."
    return None


def _on_gpu(options: argparse.Namespace, words: list[str]) -> bool:
    return (options.accelerator or value_of(words, "--trainer.accelerator")) != "cpu"


def _by_torchrun(job: Job, options: argparse.Namespace) -> int:
    if options.dry_run:
        print(torchrun.describe(job))
        return 0
    return torchrun.start(job)


def _by_slurm(job: Job, options: argparse.Namespace) -> int:
    if options.dry_run:
        print(slurm.script(job, tuple(options.sbatch), sys.executable), end="")
        return 0
    return slurm.start(job, tuple(options.sbatch), sys.executable)


LAUNCHERS: dict[str, Callable[[Job, argparse.Namespace], int]] = {
    "local": _by_torchrun,
    "torchrun": _by_torchrun,
    "slurm": _by_slurm,
}
"""The ways of starting a run."""
