"""Start the ranks of this node, or join those that torchrun has started, and run the checks on them."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_dist.cli.doctor.reachability import further_checks
from lightning_dist.cli.errors import TRAINING_FAILED, print_error, report, reported_by_another
from lightning_dist.mesh.consensus import is_consequence
from lightning_dist.run.doctor.checks import CHECKS
from lightning_dist.run.doctor.devices import num_cores
from lightning_dist.run.doctor.environment import missing_interface, own_environment
from lightning_dist.run.doctor.examination import Examination, examine
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.profile import MachineProfile
from lightning_dist.run.doctor.ranks import Ranks

__all__ = ["Request", "Result", "examine_as_one_process", "examine_as_rank", "examine_local_ranks"]

_TIMEOUT = timedelta(minutes=5)
"""Time for which ranks wait for each other. A rank that ends is noticed at once, by its connection."""

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Request:
    """Hold what the user has asked for.

    Args:
        accelerator: ``"cpu"`` or ``"gpu"``.
        all_pairs: Whether the link of every pair of ranks is measured.
        checkpoint_folder: Folder or URL of the checkpoints.
        tracking_uri: URI of the MLflow store; None: the default one.
    """

    accelerator: str
    all_pairs: bool
    checkpoint_folder: str
    tracking_uri: str | None


class Result(NamedTuple):
    """Hold what the checks have found and measured."""

    findings: list[Finding]
    profile: MachineProfile


def examine_as_one_process(request: Request) -> Result:
    """Run the checks in this process alone."""
    device = torch.device("cuda", 0) if request.accelerator == "gpu" else torch.device("cpu")
    return _examine(request, device, backend="")


def examine_as_rank(request: Request, store: dist.Store | None = None) -> Result | None:
    """Run the checks as one of the ranks that environment variables describe, as torchrun sets them.

    Args:
        request: What the user has asked for, the same on all ranks.
        store: Store of all ranks; None: the one at the address of the environment.

    Returns:
        The result, or None if this rank has failed, and the error has been printed.
    """
    try:
        wrong = missing_interface("GLOO_SOCKET_IFNAME", own_environment())
        if wrong:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']!r}: this host has no interface named {wrong}, so"
                " that its ranks cannot connect. Set it to one that leads to the other nodes (`ip link` lists them)."
            )
        device, backend = torch.device("cpu"), "gloo"
        if request.accelerator == "gpu":
            device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        result = _examine(request, device, backend)
        dist.destroy_process_group()
        return result
    except Exception as error:
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        if not is_consequence(error):
            report(text, TRAINING_FAILED)
        elif reported_by_another() is None:
            report(f"another rank has ended, so that this one ends: {text}", TRAINING_FAILED)
        return None


def _examine(request: Request, device: torch.device, backend: str) -> Result:
    examination = Examination(Ranks.connected(device), backend, request.checkpoint_folder, request.all_pairs)
    findings = examine(examination, (*CHECKS, *further_checks(request.tracking_uri)))
    return Result(findings, examination.profile)


def examine_local_ranks(request: Request, num_ranks: int) -> Result | None:
    """Start ranks on this node, and run the checks on them.

    Args:
        request: What the user has asked for.
        num_ranks: Number of ranks.

    Returns:
        The result, or None if a rank has failed. All ranks have ended then, and the error has been printed.
    """
    # The port is chosen by the store, so that no other program can take it in the meantime.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result")
        processes = mp.start_processes(
            _run_rank, (num_ranks, store.port, request, output), num_ranks, join=False, daemon=True
        )
        assert processes is not None
        return _awaited(processes.join, output)


def _awaited(join: Callable[[], bool], output: Path) -> Result | None:
    try:
        while not join():
            pass
    except ProcessExitedException as error:
        if error.signal_name is not None:
            killed = " It may be the kernel's out-of-memory killer (dmesg shows it)." * (error.signal_name == "SIGKILL")
            print_error(f"rank {error.error_index} was ended by {error.signal_name}, which ends all ranks.{killed}")
        return None
    result: Result = pickle.loads(output.read_bytes())
    return result


def _run_rank(rank: int, num_ranks: int, port: int, request: Request, output: Path) -> None:
    """Run the checks on a rank of this node, and let rank 0 write the result."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(place) for name, place in places.items()}, MASTER_ADDR=_HOST, MASTER_PORT=str(port))
    if "OMP_NUM_THREADS" not in os.environ:  # A training shares the cores in the same way.
        torch.set_num_threads(max(1, num_cores() // num_ranks))
    result = examine_as_rank(request, dist.TCPStore(_HOST, port, is_master=False))
    if result is None:
        sys.exit(TRAINING_FAILED)
    if rank == 0:
        output.write_bytes(pickle.dumps(result))
