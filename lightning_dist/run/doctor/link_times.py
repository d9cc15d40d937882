"""Measure how long collectives and messages between ranks take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.run.doctor.profile import LinkFigures

__all__ = ["COLLECTIVES", "fitted", "measure_collectives", "measure_pairs", "pairs_of", "ring_of"]

Scope = Literal["node", "between_nodes"]

_SMALLEST_BYTES = 1024
"""Size of the message whose time is the latency."""

_LARGEST_BYTES = {"cpu": 2**24}
_LARGEST_BYTES_OF_ACCELERATOR = 2**28

_LONG_S = 0.1
_LONG_IN_LATENCIES = 10
"""A message is large enough for a bandwidth if it takes this time, and so many times the latency."""

_GROWTH = 4
_REPETITIONS = 10
_REPETITIONS_OF_LARGE = 3

# torch 2.13 has renamed them.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Collective(NamedTuple):
    """Describe a collective.

    Args:
        run: Function that runs it, given a buffer of n parts, one part, another such buffer, and the group.
        sent_parts: Number of parts, of the n parts of a buffer, that each rank sends, divided by ``n - 1``.
    """

    run: Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup], Any]
    sent_parts: int


COLLECTIVES: dict[str, _Collective] = {
    "all_reduce": _Collective(lambda buffer, part, other, group: dist.all_reduce(buffer, group=group), 2),
    "all_gather": _Collective(lambda buffer, part, other, group: _all_gather(buffer, part, group=group), 1),
    "reduce_scatter": _Collective(lambda buffer, part, other, group: _reduce_scatter(part, buffer, group=group), 1),
    "all_to_all": _Collective(lambda buffer, part, other, group: dist.all_to_all_single(other, buffer, group=group), 1),
}
"""The collectives by name. Their traffic is that of NVIDIA's nccl-tests, doc/PERFORMANCE.md."""


def measure_collectives(
    group: dist.ProcessGroup, ranks: Sequence[int], scope: Scope, device: torch.device
) -> list[LinkFigures]:
    """Measure all collectives in a group. This is a collective over the group.

    Args:
        group: Process group with at least two ranks.
        ranks: Its global ranks.
        scope: Where the ranks are.
        device: Device of this rank, whose tensors are sent.
    """
    size = len(ranks)
    figures = []
    for name, collective in COLLECTIVES.items():

        def seconds(num_bytes: int, repetitions: int, collective: _Collective = collective) -> float:
            part = torch.zeros(max(num_bytes // 4 // size, 1), device=device)
            buffer, other = part.new_zeros(len(part) * size), part.new_zeros(len(part) * size)
            times = []
            for _ in range(repetitions + 1):
                _wait_for_group(group, device)
                start = perf_counter()
                collective.run(buffer, part, other, group)
                _wait_for_device(device)
                times.append(perf_counter() - start)
            slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)  # The first one may connect.
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            return float(slowest.min())

        alpha, seconds_per_byte = fitted(seconds, device)
        sent = collective.sent_parts * (size - 1) / size
        figures.append(LinkFigures(scope, name, tuple(ranks), alpha, sent / seconds_per_byte))  # type: ignore[arg-type]
    return figures


def ring_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of neighbours, of which every rank is in one or two."""
    if len(ranks) == 2:
        return [(ranks[0], ranks[1])]
    return [(rank, ranks[(index + 1) % len(ranks)]) for index, rank in enumerate(ranks)] if len(ranks) > 2 else []


def pairs_of(ranks: Sequence[int], nodes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return all pairs of ranks; with ``nodes``, the node of each rank, only those on different nodes."""
    pairs = combinations(ranks, 2)
    return [(one, two) for one, two in pairs if nodes is None or nodes[one] != nodes[two]]


def measure_pairs(
    pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup, rank: int, scope: Scope, device: torch.device
) -> list[LinkFigures]:
    """Measure messages between two ranks, one pair after the other, so that no two share a link at the same time.

    This is a collective over the group.

    Args:
        pairs: Pairs of global ranks, the same on all ranks of the group.
        group: Process group of all of them.
        rank: Global rank of this process.
        scope: Where the ranks of each pair are.
        device: Device of this rank, whose tensors are sent.

    Returns:
        The figures of the pairs in which this rank is the first.
    """
    figures = []
    for pair in pairs:
        if rank in pair:
            is_first = rank == pair[0]
            peer = pair[1] if is_first else pair[0]

            def seconds(num_bytes: int, repetitions: int, is_first: bool = is_first, peer: int = peer) -> float:
                return _message_seconds(num_bytes, repetitions, is_first, peer, device)

            alpha, seconds_per_byte = fitted(seconds, device)
            if is_first:
                figures.append(LinkFigures(scope, "point_to_point", pair, alpha, 1 / seconds_per_byte))
        _wait_for_group(group, device)
    return figures


def _message_seconds(num_bytes: int, repetitions: int, is_first: bool, peer: int, device: torch.device) -> float:
    """Return half of the time of a message to ``peer`` and back, which the first rank of the pair measures."""
    message, times = torch.zeros(num_bytes // 4, device=device), []
    for _ in range(repetitions + 1):
        start = perf_counter()
        for sends in (is_first, not is_first):
            if sends:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
        _wait_for_device(device)
        times.append((perf_counter() - start) / 2)
    fastest = torch.tensor([min(times[1:])], dtype=torch.float64, device=device)
    if is_first:  # Both ranks must decide alike on the next size.
        dist.send(fastest, peer)
    else:
        dist.recv(fastest, peer)
    return float(fastest)


def fitted(seconds: Callable[[int, int], float], device: torch.device) -> tuple[float, float]:
    """Return the latency in seconds, and the seconds that each further byte takes.

    The shortest of some repetitions counts, because other programs of the machine can only make one longer.

    Args:
        seconds: Function that returns the seconds of the shortest of some repetitions, given the bytes of the buffer
            and the number of repetitions. It must return the same on all ranks that take part.
        device: Device of the tensors.
    """
    alpha = seconds(_SMALLEST_BYTES, _REPETITIONS)
    long = max(_LONG_S, _LONG_IN_LATENCIES * alpha)
    largest = _LARGEST_BYTES.get(device.type, _LARGEST_BYTES_OF_ACCELERATOR)
    num_bytes, taken = _SMALLEST_BYTES, alpha
    while taken < long and num_bytes < largest:
        num_bytes *= _GROWTH
        taken = seconds(num_bytes, 1)
    taken = min(taken, seconds(num_bytes, _REPETITIONS_OF_LARGE))
    # Even the largest message may be too short for its time to stand out from the latency.
    return alpha, max(taken - alpha, taken / 2) / num_bytes


def _wait_for_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def _wait_for_group(group: dist.ProcessGroup, device: torch.device) -> None:
    _wait_for_device(device)
    dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
