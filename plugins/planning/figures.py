"""Know how fast devices and the links between them are: from a profile, from data sheets, or measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_dist.plugins.planning.operation_times import host_seconds
from lightning_dist.run.doctor.devices import copy_bandwidth, device_name, num_cores
from lightning_dist.run.doctor.profile import LinkFigures, MachineProfile
from lightning_dist.run.simulation import Message, Operation
from lightning_dist.run.telemetry.peak import known_peak, measured_peak

__all__ = ["DEVICES", "DeviceSpeed", "Link", "Links", "memory_of_sheet"]

_GB = 1e9


@dataclass(frozen=True)
class _DataSheet:
    """Hold what a vendor says of a device.

    Args:
        name: Name by which :func:`known_peak` finds its floating-point operations per second.
        memory_bytes_per_s: Bandwidth of its memory.
        link_bytes_per_s: Bandwidth of its links to others of a node, in one direction.
        memory_bytes: Size of its memory, of those that are sold the larger one.
    """

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: float


DEVICES = {
    "b200": _DataSheet("B200", 8000 * _GB, 900 * _GB, 180 * _GB),
    "h200": _DataSheet("H200", 4800 * _GB, 450 * _GB, 141 * _GB),
    "h100": _DataSheet("H100", 3350 * _GB, 450 * _GB, 80 * _GB),
    "a100": _DataSheet("A100", 2039 * _GB, 300 * _GB, 80 * _GB),
    "mi300x": _DataSheet("MI300X", 5300 * _GB, 448 * _GB, 192 * _GB),
    "l40s": _DataSheet("L40S", 864 * _GB, 32 * _GB, 48 * _GB),
    "l4": _DataSheet("L4", 300 * _GB, 32 * _GB, 24 * _GB),
    "a10": _DataSheet("A10", 600 * _GB, 32 * _GB, 24 * _GB),
}
"""Devices that a plan can be made for without having one, with the figures of the vendors' data sheets."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_COPIED_BYTES = 2**25
"""Bytes of a copy by which memory is measured before a training, which may have little of it."""

_REACHED = 0.7
"""Fraction of a data sheet's rates that operations are taken to reach; large products reach 60% to 80%."""

_BETWEEN_NODES_GB = 40
"""Bandwidth that is assumed between nodes with GPUs, in GB/s: one link of 400 Gbit/s for each of them, at 80%."""

_HOST_S_OF_ACCELERATOR = 5e-6
"""Seconds in which a host starts an operation on an accelerator."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Predict the seconds of operations on a device.

    Args:
        name: What the device is, and where the figures are from.
        flops_per_s: Floating-point operations per second, by dtype; the rate of other dtypes is that of float32.
        memory_bytes_per_s: Bytes that are read and written per second.
        host_s: Seconds that the host needs for an operation besides the operation itself.
        num_cores: Number of cores that the ranks of a node share; None: each rank has a device of its own, and the host
            runs ahead of it.
        measured: Measured seconds of operations, which are preferred to the rates.
        peaks: The rates of the data sheet or of the fastest product, by dtype, of which MFU is a fraction; empty for
            cores that ranks share.
    """

    name: str
    flops_per_s: Mapping[torch.dtype, float]
    memory_bytes_per_s: float
    host_s: float
    num_cores: int | None = None
    measured: Mapping[Operation, float] = field(default_factory=dict)
    peaks: Mapping[torch.dtype, float] = field(default_factory=dict)

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of an operation: measured ones, or the roofline of computation and memory."""
        if operation in self.measured:
            return self.measured[operation]
        rate = self.flops_per_s.get(operation.dtype) or self.flops_per_s[torch.float32]
        return max(operation.flops / rate, operation.num_bytes / self.memory_bytes_per_s)

    @classmethod
    def from_data_sheet(cls, name: str) -> DeviceSpeed:
        """Return the speed of a device that is not here.

        Args:
            name: A key of :data:`DEVICES`.

        Raises:
            ValueError: If the device is unknown.
        """
        sheet = _sheet_of(name)
        peaks = _known_peaks(sheet.name)
        return cls(
            f"{sheet.name}, {_REACHED:.0%} of the data sheet",
            {dtype: _REACHED * peak for dtype, peak in peaks.items()},
            _REACHED * sheet.memory_bytes_per_s,
            _HOST_S_OF_ACCELERATOR,
            peaks=peaks,
        )

    @classmethod
    def from_profile(cls, profile: MachineProfile) -> DeviceSpeed:
        """Return the speed of the slowest device of a profile, for which a step waits."""
        slowest = min(profile.devices, key=lambda device: device.flops_per_s.get("float32", 0.0))
        rates = {getattr(torch, name): rate for name, rate in slowest.flops_per_s.items() if hasattr(torch, name)}
        is_cpu = profile.backend in ("gloo", "")
        return cls(
            f"{slowest.name}, from the profile of {profile.created}",
            rates,
            slowest.memory_bytes_per_s,
            host_seconds() if is_cpu else _HOST_S_OF_ACCELERATOR,
            num_cores() if is_cpu else None,
            peaks={} if is_cpu else rates | _known_peaks(slowest.name),
        )

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpeed:
        """Return the speed of a device of this machine, which is measured."""
        is_cpu = device.type == "cpu"
        rates = {dtype: measured_peak(device, dtype).flops_per_s for dtype in ((torch.float32,) if is_cpu else _DTYPES)}
        return cls(
            f"{device_name(device)}, measured here",
            rates,
            copy_bandwidth(device, _COPIED_BYTES),
            host_seconds(),
            num_cores() if is_cpu else None,
            peaks={} if is_cpu else rates | _known_peaks(device_name(device)),
        )


def memory_of_sheet(name: str) -> int:
    """Return the bytes of memory of a device that is not here.

    Args:
        name: A key of :data:`DEVICES`.

    Raises:
        ValueError: If the device is unknown.
    """
    return int(_sheet_of(name).memory_bytes)


def _sheet_of(name: str) -> _DataSheet:
    sheet = DEVICES.get(name.lower())
    if sheet is None:
        raise ValueError(f"--device={name} is unknown: give one of {', '.join(DEVICES)}, or a profile of doctor.")
    return sheet


def _known_sheet(name: str) -> _DataSheet | None:
    """Return the data sheet of a device, such as ``NVIDIA H100 80GB HBM3``; None: there is none, or it has PCIe."""
    words = set(name.lower().replace("-", " ").split())
    return None if words & {"pcie", "nvl"} else next((DEVICES[key] for key in DEVICES if key in words), None)


def _known_peaks(name: str) -> dict[torch.dtype, float]:
    """Return the rates of the data sheet of a device, by dtype; empty: there is none."""
    peaks = {dtype: known_peak(name, dtype, False) for dtype in _DTYPES}
    return {dtype: peak.flops_per_s for dtype, peak in peaks.items() if peak is not None}


@dataclass(frozen=True)
class Link:
    """Hold the two figures of :class:`~lightning_dist.run.doctor.profile.LinkFigures`, for a number of ranks."""

    alpha_s: float
    bytes_per_s: float
    num_ranks: int


_TRAFFIC = {
    "all_reduce": lambda num_ranks: 2 * (num_ranks - 1) / num_ranks,
    "all_gather": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "reduce_scatter": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "all_to_all": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "broadcast": lambda num_ranks: 1.0,
    "point_to_point": lambda num_ranks: 1.0,
}
"""Bytes that the slowest rank sends at least, per byte of the larger buffer (nccl-tests, doc/PERFORMANCE.md)."""


@dataclass(frozen=True)
class Links:
    """Predict the seconds of messages.

    Args:
        name: Where the figures are from.
        within: Figures of messages inside of a node by operation; ``""``: those of operations that have none.
        between: Those of messages between nodes.
    """

    name: str
    within: Mapping[str, Link]
    between: Mapping[str, Link]

    def seconds(self, message: Message, num_ranks: int, num_nodes: int) -> float:
        """Return the seconds of a collective, or of a message between two ranks.

        Args:
            message: What is sent, with its kind and its bytes.
            num_ranks: Number of ranks of its group.
            num_nodes: Number of nodes that they are on.
        """
        if num_ranks == 1:
            return 0.0
        figures = self.between if num_nodes > 1 else self.within
        link = figures.get(message.operation) or figures[""]
        hops = 1.0 if message.operation == "point_to_point" else (num_ranks - 1) / max(link.num_ranks - 1, 1)
        traffic = _TRAFFIC[message.operation](num_ranks) * message.num_bytes
        return link.alpha_s * max(hops, 1.0 / link.num_ranks) + traffic / link.bytes_per_s

    @classmethod
    def assumed(cls, device: str, backend: str) -> Links:
        """Return figures for machines that were not measured.

        Args:
            device: Name of the device; if it has no key of :data:`DEVICES`, it is taken to be linked by PCIe.
            backend: Backend of the process groups; ``"gloo"`` stands for CPUs.
        """
        if backend == "gloo":
            link = Link(2e-4, 1 * _GB, 2)
            return cls("assumed: 1 GB/s and 0.2 ms", {"": link}, {"": link})
        sheet = _known_sheet(device)
        inside = Link(2e-5, 0.8 * (sheet.link_bytes_per_s if sheet else 32 * _GB), 8)
        return cls(
            f"assumed: {inside.bytes_per_s / _GB:.0f} GB/s in a node, {_BETWEEN_NODES_GB} GB/s between nodes",
            {"": inside},
            {"": Link(4e-5, _BETWEEN_NODES_GB * _GB, 8)},
        )

    @classmethod
    def from_profile(cls, profile: MachineProfile) -> Links:
        """Return the slowest links of each kind of a profile.

        Raises:
            ValueError: If the profile has no links, because it was made by one process.
        """
        if not profile.links:
            raise ValueError(
                "The profile has no links: run `lightning-dist doctor --write` in all processes of the nodes, by"
                " torchrun, or with --devices."
            )
        scopes: dict[str, dict[str, Link]] = {"node": {}, "between_nodes": {}}
        for figures in profile.links:
            _keep_slowest(scopes[figures.scope], figures)
        within, between = (_completed(scopes[scope]) for scope in ("node", "between_nodes"))
        name = f"from the profile of {profile.created}"
        if between or profile.backend in ("gloo", ""):
            return cls(name, within or between, between or within)
        assumed = cls.assumed("", profile.backend).between
        return cls(f"{name}; {_BETWEEN_NODES_GB} GB/s between nodes, assumed", within, assumed)


def _keep_slowest(links: dict[str, Link], figures: LinkFigures) -> None:
    known = links.get(figures.operation)
    if known is None or figures.bytes_per_s < known.bytes_per_s:
        links[figures.operation] = Link(figures.alpha_s, figures.bytes_per_s, len(figures.ranks))


def _completed(links: dict[str, Link]) -> dict[str, Link]:
    """Add figures for operations that have none."""
    if not links:
        return links
    # Ranks that exchange messages send and receive at the same time, as in an all-to-all.
    exchange = {"point_to_point": links["all_to_all"]} if "all_to_all" in links else {}
    return {**links, **exchange, "": links.get("all_reduce") or next(iter(links.values()))}
