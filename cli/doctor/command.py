"""Run ``lightning-dist doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, TRAINING_FAILED, report

if TYPE_CHECKING:  # It imports torch.
    from lightning_dist.cli.doctor.ranks import Result

_DESCRIPTION = """\
Measure the links, devices and folders of the nodes of a run before it starts, and find what differs between its ranks:
versions, environment variables and clocks. Each finding says what was seen, what it means and what to do.
"""
_EXAMPLES = """\
examples:
  lightning-dist doctor                                    this process alone
  lightning-dist doctor --devices 8 --checkpoint-folder /shared/runs
  lightning-dist doctor --devices 8 --pairs --write profile.json
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 -m lightning_dist.cli doctor

exit codes: 0 nothing failed, 1 something failed, 2 bad arguments
"""


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist doctor``.

    Args:
        arguments: Words of the command line after ``doctor``.

    Returns:
        The exit code: 0 if nothing failed, 1 if something failed, 2 for bad arguments. On other ranks than 0 it is 0 if
        the checks have ended, whatever they have found, so that a launcher does not end rank 0 before it has printed
        them.
    """
    options = make_parser().parse_args(arguments)
    mistake = _mistake(options)
    if mistake is not None:
        return report(mistake, BAD_CONFIGURATION)
    import torch

    accelerator = options.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", options.devices or 1))
    if accelerator == "gpu" and torch.cuda.device_count() < num_here:
        return report(
            f"--accelerator={options.accelerator}: {num_here} ranks on this node need a GPU each, and"
            f" {torch.cuda.device_count()} can be used. Start as many ranks as there are GPUs, or give"
            " --accelerator cpu.",
            BAD_CONFIGURATION,
        )
    from lightning_dist.cli.doctor.ranks import Request, examine_as_one_process, examine_as_rank, examine_local_ranks

    request = Request(accelerator, options.pairs, options.checkpoint_folder, options.tracking_uri)
    if _is_launched():
        result = examine_as_rank(request)
    elif num_here == 1:
        result = examine_as_one_process(request)
    else:
        result = examine_local_ranks(request, num_here)
    if result is None:
        return TRAINING_FAILED
    if os.environ.get("RANK", "0") != "0":
        return 0
    return _present(result, options)


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(
        prog="lightning-dist doctor",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--devices", metavar="N", type=int, help="number of ranks to start on this node (1)")
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="devices to measure (GPUs if there are any)",
    )
    parser.add_argument(
        "--pairs", action="store_true", help="measure the link of every pair of ranks, and not only of neighbours"
    )
    parser.add_argument(
        "--checkpoint-folder", metavar="DIR", default=".", help="folder of the checkpoints (the working directory)"
    )
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="the MLflow store; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db",
    )
    parser.add_argument("--write", metavar="OUT", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--json", action="store_true", help="print findings and figures as JSON")
    return parser


def _is_launched() -> bool:
    """Return whether torchrun, or a script that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _mistake(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments, or with how the command was started; None: nothing."""
    if not sys.platform.startswith("linux"):
        return (
            f"this machine has {sys.platform}, and the command reads figures of Linux (/proc, /sys). Run it on Linux."
        )
    if options.devices is not None and options.devices < 1:
        return f"--devices={options.devices}: expected at least 1."
    if options.write is not None and not options.write.absolute().parent.is_dir():
        return f"--write={str(options.write)!r}: there is no folder {options.write.absolute().parent}."
    if _is_launched():
        missing = [name for name in _VARIABLES if not os.environ.get(name, "").isdigit()]
        if missing:
            return (
                f"RANK={os.environ['RANK']} is set, but {', '.join(missing)} is not a number. Start the command by"
                " torchrun, which sets all of them, or unset RANK to examine this node alone."
            )
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if options.devices not in (None, here):
            return (
                f"--devices={options.devices}, but torchrun started {here} processes on this node. Leave --devices out,"
                f" or give torchrun --nproc-per-node={options.devices}."
            )
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return (
            f"srun has started {os.environ['SLURM_STEP_NUM_TASKS']} tasks, which do not know each other. Start one"
            " torchrun on each node by it: srun --ntasks-per-node=1 torchrun ... -m lightning_dist.cli doctor."
        )
    return None


def _present(result: Result, options: argparse.Namespace) -> int:
    """Print the findings, write the profile, and return the exit code."""
    from lightning_dist.run.doctor.finding import failed

    if options.write is not None:
        result.profile.write(options.write)
    has_failed = failed(result.findings)
    if options.json:
        findings = [asdict(finding) for finding in result.findings]
        print(json.dumps({"passed": not has_failed, "findings": findings, "profile": asdict(result.profile)}, indent=2))
    else:
        from rich.console import Console

        from lightning_dist.cli.doctor.table import print_findings

        print_findings(result.findings, Console())
        if options.write is not None:
            print(f"The figures are in {options.write}.")
    return TRAINING_FAILED if has_failed else 0
