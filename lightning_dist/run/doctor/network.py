"""Read from the system which links a node has, and how fast they are said to be."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.ranks import Ranks

__all__ = ["Adapter", "adapters", "check_topology", "gpu_links", "interfaces", "kinds_of_pairs", "own_interface"]

_SYS = Path("/sys/class")


@dataclass(frozen=True)
class Adapter:
    """Describe an adapter to a network.

    Args:
        name: Name of the interface, or name and port of an InfiniBand adapter.
        kind: ``"InfiniBand"``, ``"RoCE"`` or ``"Ethernet"``.
        is_up: Whether it has a connection.
        bits_per_s: Bits per second that it is said to have; None: the system does not tell.
    """

    name: str
    kind: str
    is_up: bool
    bits_per_s: float | None

    def __str__(self) -> str:
        speed = "of unknown speed" if self.bits_per_s is None else f"{self.bits_per_s / 1e9:g} Gbit/s"
        return f"{self.name} ({self.kind}, {speed}{'' if self.is_up else ', without a connection'})"


def interfaces(root: Path = _SYS) -> list[Adapter]:
    """Return the interfaces of this host, without the loopback one.

    Args:
        root: Folder in which the kernel describes them.
    """
    found = []
    for folder in sorted((root / "net").glob("*")):
        if folder.name == "lo":
            continue
        megabits = _text(folder / "speed")  # A virtual interface has none, or -1.
        speed = float(megabits) * 1e6 if megabits.isdigit() and int(megabits) > 0 else None
        found.append(Adapter(folder.name, "Ethernet", _text(folder / "operstate") in ("up", "unknown"), speed))
    return found


def adapters(root: Path = _SYS) -> list[Adapter]:
    """Return the ports of the InfiniBand and RoCE adapters of this host.

    Args:
        root: Folder in which the kernel describes them.
    """
    found = []
    for port in sorted((root / "infiniband").glob("*/ports/*")):
        kind = "InfiniBand" if _text(port / "link_layer") in ("InfiniBand", "") else "RoCE"
        rate = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
        name = f"{port.parents[1].name}:{port.name}"
        is_up = "ACTIVE" in _text(port / "state")
        found.append(Adapter(name, kind, is_up, float(rate[1]) * 1e9 if rate else None))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # The speed of an interface without a cable cannot be read.
        return ""


_KINDS = {
    "NV": "NVLink",
    "PIX": "PCIe, through one switch",
    "PXB": "PCIe, through several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through the CPU",
    "SYS": "PCIe, between CPU sockets",
}
"""The kinds of links in the table of ``nvidia-smi topo -m``, by the beginning of their names, as its legend says."""


def gpu_links(table: str) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of GPUs that each kind of link connects.

    Args:
        table: What ``nvidia-smi topo -m`` has printed.
    """
    links: dict[str, list[tuple[int, int]]] = defaultdict(list)
    lines = re.sub(r"\x1b\[[\d;]*m", "", table).splitlines()
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    for row in rows:
        one = int(row[0].removeprefix("GPU"))
        for two, cell in enumerate(row[1 : len(rows) + 1]):
            kind = next((kind for start, kind in _KINDS.items() if cell.startswith(start)), None)
            if two > one and kind is not None:
                links[f"{kind} ({cell})"].append((one, two))
    return dict(links)


def kinds_of_pairs(ranks: Ranks) -> dict[tuple[int, int], str]:
    """Return the kind of link of each pair of ranks of a node, as far as it is known. This is a collective.

    Each rank of a node is taken to use the GPU of its place among them, as torchrun's ``LOCAL_RANK`` chooses it. If
    ``CUDA_VISIBLE_DEVICES`` gives GPUs other numbers, no kind is known.
    """
    is_known = ranks.device.type == "cuda" and "CUDA_VISIBLE_DEVICES" not in os.environ
    of_ranks = ranks.gather(gpu_links(_gpu_table()) if is_known else {})
    kinds = {}
    for node in ranks.of_nodes:
        for kind, pairs in of_ranks[node[0]].items():
            for one, two in pairs:
                if two < len(node):
                    kinds[node[one], node[two]] = kinds[node[two], node[one]] = kind
    return kinds


def _gpu_table() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def own_interface(peer: str) -> str | None:
    """Return the interface by which this host reaches another one; None: the system does not tell.

    Args:
        peer: Name or address of the other host.
    """
    import fcntl
    import struct

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # A datagram socket sends nothing by this.
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                except OSError:
                    continue
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    except OSError:
        return None
    return None


def check_topology(examination: Examination) -> list[Finding]:
    """Name the links of the nodes, as the system tells them."""
    ranks = examination.ranks
    own = (gpu_links(_gpu_table()), [*adapters(), *(port for port in interfaces() if port.is_up)])
    of_ranks = ranks.gather(own)
    lines = []
    for links, ports in (of_ranks[node[0]] for node in ranks.of_nodes):
        line = "; ".join([*_named_links(links), *map(str, ports)])
        lines.append(line or "The system names no link.")
    seen = _joined({ranks.named(node): line for node, line in zip(ranks.of_nodes, lines, strict=True)})
    broken = {
        ranks.named(node): ", ".join(port.name for port in ports if not port.is_up)
        for node, (_, ports) in zip(ranks.of_nodes, (of_ranks[node[0]] for node in ranks.of_nodes), strict=True)
    }
    if names := "; ".join(f"{port} of {node}" for node, port in broken.items() if port):
        return [
            Finding(
                "links by name",
                "warn",
                f"{seen} The adapter {names} has no connection, so that NCCL does not use it.",
                "Check its cable and the subnet manager (`ibstat`), or leave it out by NCCL_IB_HCA if it is meant to"
                " be unused.",
            )
        ]
    return [Finding("links by name", "pass", seen)]


def _named_links(links: dict[str, list[tuple[int, int]]]) -> Iterator[str]:
    for kind, pairs in links.items():
        shown = ", ".join(f"{one}-{two}" for one, two in pairs[:8])
        yield f"GPUs {shown}{', ...' if len(pairs) > 8 else ''}: {kind}"


def _joined(lines: dict[str, str]) -> str:
    """Return the lines of the nodes, of which equal ones are shown once."""
    if len(set(lines.values())) == 1:
        return f"{'Every node has' if len(lines) > 1 else 'The node has'}: {next(iter(lines.values()))}."
    return " ".join(f"{node}: {line}." for node, line in lines.items())
