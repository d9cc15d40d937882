"""Check environment variables, limits and shared memory, which decide how processes communicate."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.network import adapters
from lightning_dist.run.doctor.ranks import Ranks

__all__ = ["Environment", "check_environment", "judge_environment", "missing_interface", "own_environment"]

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")
_OF_NODES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID")
"""Variables that name what a node has, and which may differ between nodes."""

DANGEROUS: dict[tuple[str, str], str] = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node then send through the memory of the host, and not by NVLink or PCIe.",
    ("NCCL_SHM_DISABLE", "1"): "Processes of a node then send over the network if GPUs cannot reach each other.",
    ("NCCL_IB_DISABLE", "1"): "Nodes then send over TCP, and not by InfiniBand.",
    ("NCCL_DEBUG", "TRACE"): "NCCL then writes lines for every call.",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "Every collective is then checked on all ranks by another one.",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "The host then waits for every collective, which nothing overlaps with.",
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"): "A collective that hangs then never ends.",
    ("CUDA_LAUNCH_BLOCKING", "1"): "The host then waits for every kernel.",
}
"""Variables with values that are meant for finding a fault, and what they do in a run."""

LEAST_SHARED_BYTES = 2**30
"""NVIDIA's guide to NCCL (Troubleshooting, Shared memory) gives containers --shm-size=1g."""

LEAST_FREE_SHARED_BYTES = 2**28

_FILES_OF_PROCESS, _FILES_OF_PEER = 512, 8
"""Open files that a process needs for itself and its loaders, and for the connections of its groups to each rank."""


@dataclass(frozen=True)
class Environment:
    """Hold what is checked of one rank.

    Args:
        variables: Environment variables that libraries of communication read.
        interfaces: Names of the host's network interfaces.
        max_open_files: Number of files that the process may open (``ulimit -n``).
        max_locked_bytes: Bytes that it may lock in memory (``ulimit -l``); None: any number.
        has_infiniband: Whether the host has an InfiniBand or RoCE adapter.
        shared_bytes: Size of ``/dev/shm``; 0: there is none.
        free_shared_bytes: Free bytes of it.
    """

    variables: Mapping[str, str]
    interfaces: tuple[str, ...]
    max_open_files: int
    max_locked_bytes: int | None
    has_infiniband: bool
    shared_bytes: int
    free_shared_bytes: int


def own_environment(shared: Path = Path("/dev/shm")) -> Environment:
    """Return what is checked of this process.

    Args:
        shared: Folder of the shared memory.
    """
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    usage = shutil.disk_usage(shared) if os.access(shared, os.W_OK) else None
    return Environment(
        {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        tuple(name for _, name in socket.if_nameindex()),
        2**31 if files == resource.RLIM_INFINITY else files,
        None if locked == resource.RLIM_INFINITY else locked,
        bool(adapters()),
        usage.total if usage else 0,
        usage.free if usage else 0,
    )


def check_environment(examination: Examination) -> list[Finding]:
    """Check the environments of all ranks."""
    return judge_environment(examination.ranks.gather(own_environment()), examination.ranks)


def judge_environment(of_ranks: list[Environment], ranks: Ranks) -> list[Finding]:
    """Find what differs between ranks, or is dangerous or too small on any of them.

    Args:
        of_ranks: The environments of the ranks.
        ranks: The ranks, and the hosts that they are on.
    """
    findings = [*_different(of_ranks, ranks), *_dangerous(of_ranks, ranks), *_missing_interfaces(of_ranks, ranks)]
    if not findings:
        shown = ", ".join(f"{name}={value}" for name, value in of_ranks[0].variables.items())
        findings.append(
            Finding("environment", "pass", f"All ranks have {shown or 'no variable of NCCL, gloo and torch'}.")
        )
    limits = [*_limits(of_ranks, ranks), *_shared_memory(of_ranks, ranks)]
    if not limits:
        files, shared = min(own.max_open_files for own in of_ranks), min(own.shared_bytes for own in of_ranks)
        limits.append(
            Finding(
                "limits", "pass", f"{files:,} open files, and {shared / 2**30:,.1f} GiB of shared memory in /dev/shm."
            )
        )
    return findings + limits


def _different(of_ranks: list[Environment], ranks: Ranks) -> list[Finding]:
    different = []
    for name in sorted({name for own in of_ranks for name in own.variables}):
        groups = ranks.of_nodes if name in _OF_NODES else [list(range(ranks.world_size))]
        for group in groups:
            holders: dict[str | None, list[int]] = {}
            for rank in group:
                holders.setdefault(of_ranks[rank].variables.get(name), []).append(rank)
            if len(holders) > 1 and name != "NCCL_HOSTID":
                parts = [
                    f"{'not set' if value is None else value} on {ranks.named(holding)}"
                    for value, holding in holders.items()
                ]
                different.append(f"{name} is {', and '.join(parts)}")
    if not different:
        return []
    return [
        Finding(
            "environment",
            "warn",
            "; ".join(different)
            + ". Ranks that choose different ways to communicate are slow, or wait for each other.",
            "Set it alike on all nodes, in the script that starts the ranks.",
        )
    ]


def _dangerous(of_ranks: list[Environment], ranks: Ranks) -> list[Finding]:
    findings = []
    for (name, value), effect in DANGEROUS.items():
        holding = [rank for rank, own in enumerate(of_ranks) if own.variables.get(name, "").upper() == value]
        if holding:
            findings.append(
                Finding(
                    "environment",
                    "warn",
                    f"{name}={value} is set on {ranks.named(holding)}. {effect}",
                    f"Unset {name}, unless you are looking for a fault.",
                )
            )
    return findings


def missing_interface(variable: str, own: Environment) -> str | None:
    """Return the names in a variable of which no interface of this host has the name; None: all are right.

    Args:
        variable: ``"NCCL_SOCKET_IFNAME"``, in which a name is the beginning of one unless ``=`` is before the list, and
            ``^`` excludes names; or ``"GLOO_SOCKET_IFNAME"``, whose names are whole.
        own: The environment of the rank, with its variables and the interfaces of its host.
    """
    value = own.variables.get(variable, "")
    if not value or value.startswith("^"):
        return None
    is_whole = value.startswith("=") or variable.startswith("GLOO_")
    names = value.removeprefix("=").split(",")
    has = [any(port == name if is_whole else port.startswith(name) for port in own.interfaces) for name in names]
    # gloo needs every name; NCCL uses those that it finds.
    right = all(has) if variable.startswith("GLOO_") else any(has)
    return None if right else ", ".join(name for name, found in zip(names, has, strict=True) if not found)


def _missing_interfaces(of_ranks: list[Environment], ranks: Ranks) -> list[Finding]:
    findings = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wrong = {rank: name for rank, own in enumerate(of_ranks) if (name := missing_interface(variable, own))}
        if wrong:
            has = ", ".join(of_ranks[min(wrong)].interfaces)
            findings.append(
                Finding(
                    "environment",
                    "fail",
                    f"{variable} names {', '.join(dict.fromkeys(wrong.values()))}, and {ranks.named(wrong)} has no such"
                    f" interface, but {has}. The ranks cannot connect.",
                    f"Set {variable} to the interface that leads to the other nodes.",
                )
            )
    return findings


def _limits(of_ranks: list[Environment], ranks: Ranks) -> list[Finding]:
    findings = []
    needed = _FILES_OF_PROCESS + _FILES_OF_PEER * ranks.world_size
    few = {rank: own.max_open_files for rank, own in enumerate(of_ranks) if own.max_open_files < needed}
    if few:
        findings.append(
            Finding(
                "limits",
                "warn",
                f"{ranks.named(few)} may open {min(few.values())} files. {ranks.world_size} ranks need about {needed}:"
                " connections and the workers of data loaders count as files.",
                f"Raise the limit before the ranks start: `ulimit -n {max(65536, needed)}`.",
            )
        )
    locked = {
        rank: own.max_locked_bytes
        for rank, own in enumerate(of_ranks)
        if own.has_infiniband and own.max_locked_bytes is not None
    }
    if locked:
        findings.append(
            Finding(
                "limits",
                "warn",
                f"{ranks.named(locked)} may lock {min(locked.values()) / 2**20:,.0f} MiB of memory. InfiniBand sends"
                " from locked memory, and NCCL fails without enough of it.",
                "Set `ulimit -l unlimited`, or give the container --ulimit memlock=-1.",
            )
        )
    return findings


def _shared_memory(of_ranks: list[Environment], ranks: Ranks) -> list[Finding]:
    small = {
        rank: own
        for rank, own in enumerate(of_ranks)
        if own.shared_bytes < LEAST_SHARED_BYTES or own.free_shared_bytes < LEAST_FREE_SHARED_BYTES
    }
    if not small:
        return []
    worst = min(small.values(), key=lambda own: own.free_shared_bytes)
    return [
        Finding(
            "shared memory",
            "warn",
            f"/dev/shm of {ranks.named(small)} has {worst.free_shared_bytes / 2**20:,.0f} free of"
            f" {worst.shared_bytes / 2**20:,.0f} MiB. The workers of data loaders pass batches through it, and NCCL's"
            " processes messages; they end with a bus error when it is full.",
            "Give the container --shm-size=8g or a volume in memory at /dev/shm, and remove what ended programs"
            " have left.",
        )
    ]
