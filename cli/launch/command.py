"""Run ``lightning-dist launch``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error
from lightning_dist.cli.launch import ray, slurm, torchrun
from lightning_dist.cli.launch.job import TRAINER_COMMANDS, Job, Launcher, value_of
from lightning_dist.mesh.replica_range import ReplicaRange

_DESCRIPTION = """\
Start a run on the devices of this node, on several nodes, or as a job of SLURM or Ray. What follows the two hyphens is
a command of lightning-dist that trains or evaluates, or a script of your own. The output of each rank is kept in a
file, that of rank 0 is printed as well, and after a failure the error of the rank that failed first is printed.
"""
_EXAMPLES = """\
examples:
  lightning-dist launch --devices 8 --max-restarts 3 -- fit -c my.yaml
  lightning-dist launch --devices 2 --elastic 2:4 --max-restarts 99 -- fit -c my.yaml          (4 replicas)
  lightning-dist launch --devices 8 --elastic 3:4 --replicas 0 --head node1 -- fit -c my.yaml  (1 to 3 on the others)
  lightning-dist launch --on torchrun --nodes 2 --devices 8 --head node1 -- fit -c my.yaml     (on both nodes)
  lightning-dist launch --on slurm --nodes 2 --devices 8 --sbatch partition=gpu --sbatch time=8:00:00 -- fit -c my.yaml
  lightning-dist launch --on ray --nodes 1:4 --devices 8 --max-restarts 9 -- fit -c my.yaml
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
        num_nodes=options.nodes[-1],
        num_devices=options.devices or 0,
        max_restarts=options.max_restarts,
        logs=Path(options.logs or time.strftime("launch/%Y%m%d-%H%M%S")).absolute(),
        head=options.head,
        on_gpu=_on_gpu(options, words),
        min_nodes=options.nodes[0] if len(options.nodes) > 1 else None,
        elastic=options.elastic,
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
    if options.dry_run:
        print(LAUNCHERS[options.on].describe(job, options).rstrip())
        return 0
    return LAUNCHERS[options.on].start(job, options)


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
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=_nodes,
        default=(1,),
        help="number of nodes (1), or MIN:MAX where the run may restart with another number of them",
    )
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices of each node")
    parser.add_argument(
        "--accelerator",
        choices=("cpu", "gpu"),
        help="what SLURM or Ray is asked for (GPUs, unless the command has --trainer.accelerator=cpu)",
    )
    parser.add_argument(
        "--max-restarts", metavar="N", type=int, default=0, help="how often a run that failed starts again (0)"
    )
    parser.add_argument(
        "--head",
        metavar="HOST[:PORT]",
        default="",
        help="the node at which the nodes of a run by torchrun, or of --elastic, meet; the Ray cluster (that of this"
        " machine), or local",
    )
    _add_options_of_replicas(parser)
    parser.add_argument("--logs", metavar="DIR", help="folder of the output of the ranks (launch/DATE-TIME)")
    parser.add_argument(
        "--sbatch",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="further option of sbatch: time=8:00:00",
    )
    parser.add_argument(
        "--wait", metavar="S", type=float, default=0.0, help="how many seconds to wait for nodes of the Ray cluster (0)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command or the script, and start nothing")
    return parser


def _add_options_of_replicas(parser: ArgumentParser) -> None:
    """Add the options of replicas that leave and join the run."""
    parser.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        type=_replicas,
        help="start MAX replicas with --devices each, which train on without one that fails, with at least MIN of them",
    )
    parser.add_argument(
        "--replicas",
        metavar="LIST",
        type=_indices,
        help="the replicas of --elastic that this node starts, such as 0,1 (all); that of replica 0 is --head",
    )
    parser.add_argument(
        "--heartbeat",
        metavar="S",
        type=float,
        help="seconds after which a replica that sends no sign of life is left out (1)",
    )


def _mistake(options: argparse.Namespace, job: Job) -> str | None:
    """Return what is wrong with the options, and how to mend it; None: nothing."""
    if min(job.num_nodes, job.min_nodes or 1) < 1:
        return f"--nodes={job.nodes}: expected at least 1."
    if job.min_nodes is not None and job.min_nodes >= job.num_nodes:
        return f"--nodes={job.nodes}: expected the smaller number first, as in --nodes 1:4."
    for name, smallest in (("max_restarts", 0), ("wait", 0)):
        if getattr(options, name) < smallest:
            return f"--{name.replace('_', '-')}={getattr(options, name)}: expected at least {smallest}."
    if options.devices is None or options.devices < 1:
        given = "" if options.devices is None else f"={options.devices}"
        return f"--devices{given}: give the number of devices of each node, at least 1."
    if options.heartbeat is not None and (options.elastic is None or options.heartbeat <= 0):
        return f"--heartbeat={options.heartbeat:g}: expected a number above 0, beside --elastic."
    for name in sorted({name for launcher in LAUNCHERS.values() for name in launcher.uses}):
        value = getattr(options, name)
        if value and name not in LAUNCHERS[options.on].uses:
            users = " or ".join(f"--on {on}" for on, launcher in LAUNCHERS.items() if name in launcher.uses)
            first = value[0] if isinstance(value, list | tuple) and name != "elastic" else value
            return f"--{name}={first} belongs to {users}; --on={options.on} does not use it. Leave it out."
    if Path(options.logs or ".").is_file():
        return f"--logs={options.logs!r} is a file. Give a folder."
    return LAUNCHERS[options.on].mistake(job, options)


def _nodes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or MIN:MAX")
    return tuple(map(int, text.split(":")))


def _indices(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text) or len(set(text.split(","))) < text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected indices of replicas, such as 0 or 0,1")
    return tuple(sorted(map(int, text.split(","))))


def _replicas(text: str) -> ReplicaRange:
    try:
        return ReplicaRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("elastic=")) from error


def _on_gpu(options: argparse.Namespace, words: list[str]) -> bool:
    return (options.accelerator or value_of(words, "--trainer.accelerator")) != "cpu"


LAUNCHERS: dict[str, Launcher] = {
    "local": torchrun.LOCAL,
    "torchrun": torchrun.TORCHRUN,
    "slurm": slurm.SLURM,
    "ray": ray.RAY,
}
"""The ways of starting a run."""
