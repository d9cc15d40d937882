"""Predict the time of a training step from what its ranks compute and send."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.figures import DeviceSpeed, Links
from lightning_dist.plugins.planning.layouts import Layout

__all__ = [
    "Busy",
    "StepTime",
    "Where",
    "busy_seconds",
    "messages",
    "peak_flops_per_s",
    "predict_step_time",
    "step_time",
]

_HIDDEN = (frozenset({"dp_replicate", "dp_shard"}), frozenset({"dp_shard", "cp"}))
"""Axes over which gradients and parameters are sent, while devices compute other layers at the same time.

Ranks of ``cp`` share parameters as well, over both axes together."""


@dataclass(frozen=True)
class Where:
    """Hold what is known of the devices that a training is planned for.

    Args:
        num_devices: Number of devices of a node.
        speed: How fast they compute.
        links: How fast they send to each other.
    """

    num_devices: int
    speed: DeviceSpeed
    links: Links

    @property
    def source(self) -> str:
        """Return what the devices and links are, and where their figures are from."""
        return f"{self.speed.name}; links {self.links.name}"


@dataclass(frozen=True)
class StepTime:
    """Hold the predicted seconds of an optimizer step, and the parts of which they are the sum.

    Args:
        compute: Forwards and backwards.
        communication: Messages for which the device waits, by the axes of the mesh over which they are sent.
        bubble: Waiting for other stages of a pipeline.
        optimizer: The optimizer's step.
        host: Python and the start of operations, as far as devices wait for it.
        source: What the devices and links are, and where their figures are from.
    """

    compute: float
    communication: Mapping[str, float]
    bubble: float
    optimizer: float
    host: float
    source: str = ""

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return self.compute + sum(self.communication.values()) + self.bubble + self.optimizer + self.host

    def scaled(self, factor: float) -> StepTime:
        """Return the time with all parts multiplied by a factor."""
        communication = {axes: seconds * factor for axes, seconds in self.communication.items()}
        parts = (self.bubble * factor, self.optimizer * factor, self.host * factor)
        return StepTime(self.compute * factor, communication, *parts, self.source)


def predict_step_time(layout: Layout, runs: Sequence[DryRun], where: Where) -> StepTime:
    """Return the time of a step, which the slowest stage of a pipeline determines.

    Args:
        layout: The layout that the dry runs had.
        runs: The dry run of a rank of each stage, or of some of them.
        where: What is known of the devices.
    """
    times = [step_time(layout, busy_seconds(run, where), messages(layout, run, where), where) for run in runs]
    return max(times, key=lambda time: time.total)


@dataclass(frozen=True)
class Busy:
    """Hold the seconds for which a rank works in a step, if it has a core or a device for itself.

    Args:
        compute: Forwards and backwards.
        optimizer: The optimizer's step.
        host: Python and the start of all operations.
        fill: Time that it waits for other stages of a pipeline, as a fraction of the time that it works.
    """

    compute: float
    optimizer: float
    host: float
    fill: float


def busy_seconds(run: DryRun, where: Where) -> Busy:
    """Return the seconds for which the rank of a dry run works."""
    compute, optimizer = (
        sum(where.speed.seconds(operation) * number for operation, number in work.operations.items())
        for work in (run.work, run.optimizer)
    )
    host = where.speed.host_s * (run.work.num_dispatches + run.optimizer.num_dispatches)
    return Busy(compute, optimizer, host, run.fill)


def peak_flops_per_s(run: DryRun, where: Where) -> float:
    """Return the greatest rate of the device in the dtype of most products of a dry run; 0: it is not known."""
    flops: Counter[torch.dtype] = Counter()
    for operation, number in run.work.operations.items():
        flops[operation.dtype] += operation.flops * number
    return where.speed.peaks.get(flops.most_common(1)[0][0], 0.0) if flops else 0.0


def messages(layout: Layout, run: DryRun, where: Where) -> dict[str, float]:
    """Return the seconds of the messages of a dry run, by the axes over which they are sent.

    Args:
        layout: The layout whose groups send them, which may have more ranks along an axis than that of the run.
        run: The dry run.
        where: What is known of the devices.
    """
    seconds: dict[str, float] = defaultdict(float)
    for work in (run.work, run.optimizer):
        for message, number in work.messages.items():
            axes = run.axes[message.group]
            num_ranks = math.prod(layout.sizes[axis] for axis in axes)
            num_nodes = _num_nodes(axes, layout, where.num_devices)
            seconds[" x ".join(axes)] += number * where.links.seconds(message, num_ranks, num_nodes)
    return {axes: total for axes, total in seconds.items() if total > 0}


def step_time(layout: Layout, busy: Busy, sent: Mapping[str, float], where: Where) -> StepTime:
    """Return the time of a step of a rank.

    A stage of a pipeline waits for others by its schedule: with ``p`` stages, ``m`` microbatches and ``1f1b``, for
    ``(p - 1) / m`` of its own time (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM, SC 2021, section 2.2). Messages with gradients and parameters are sent while the device computes,
    and what is longer than that counts. Ranks that share cores take turns: each works as many times longer as there are
    ranks for a core, and waiting costs only as far as it leaves cores without work.

    Args:
        layout: The layout of the ranks.
        busy: The seconds for which the rank works.
        sent: The seconds of its messages, by the axes over which they are sent.
        where: What is known of the devices.
    """
    fill, num_cores = busy.fill, where.speed.num_cores
    if num_cores is None:
        hidden = sum(seconds for axes, seconds in sent.items() if _is_hidden(axes))
        rest = max(1 - busy.compute / hidden, 0.0) if hidden else 0.0
        exposed = {axes: seconds * rest if _is_hidden(axes) else seconds for axes, seconds in sent.items()}
        bubble = fill * (busy.compute + sum(exposed.values()))
        host = max(busy.host - busy.compute - busy.optimizer, 0.0)
        return StepTime(busy.compute, exposed, bubble, busy.optimizer, host, where.source)
    crowd = max(min(layout.num_ranks, where.num_devices) / num_cores, 1.0)
    bubble = max((1 + fill - crowd) * (busy.compute + busy.host + sum(sent.values())), 0.0)
    return StepTime(busy.compute * crowd, sent, bubble, busy.optimizer * crowd, busy.host * crowd, where.source)


def _is_hidden(axes: str) -> bool:
    return any(hidden.issuperset(axes.split(" x ")) for hidden in _HIDDEN) and axes != "cp"


def _num_nodes(axes: Sequence[str], layout: Layout, num_devices: int) -> int:
    """Return the number of nodes that a group over some axes is on."""
    names = list(ParallelLayout().sizes)
    num_nodes = 1
    for axis in axes:
        inner = math.prod(layout.sizes[name] for name in names[names.index(axis) + 1 :])
        num_nodes *= min(layout.sizes[axis], -(-inner * layout.sizes[axis] // num_devices))
    return num_nodes
