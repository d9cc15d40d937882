"""Compare the clocks of the ranks with that of rank 0, as NTP compares the clocks of hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.format import seconds_text

__all__ = ["LARGEST_SKEW_S", "Offset", "check_clocks"]

LARGEST_SKEW_S = 1.0
"""Logs and the names of files have seconds, so that a smaller difference does not change their order."""

_NUM_EXCHANGES = 10


class Offset(NamedTuple):
    """Hold by how much a clock is ahead of another one.

    Args:
        seconds: Estimate of the offset in seconds; a negative one means that the clock is behind.
        uncertainty_s: Largest possible error of the estimate in seconds.
    """

    seconds: float
    uncertainty_s: float


def check_clocks(examination: Examination, clock: Callable[[], int] = time.time_ns) -> list[Finding]:
    """Measure how far the clock of each rank is from that of rank 0.

    In an exchange, rank 0 reads its clock (t0) and sends a message, the other rank reads its own when the message
    arrives (t1) and when it answers (t2), and rank 0 reads its clock again (t3). The other clock is ahead by
    ``((t1 - t0) + (t2 - t3)) / 2``, with an error of at most half of ``(t3 - t0) - (t2 - t1)``, which is the time that
    the messages took. The exchange with the least of it counts (Mills et al., RFC 5905, sections 8 and 10).

    Args:
        examination: The ranks whose clocks are compared, and their collectives.
        clock: Function that returns this rank's time in nanoseconds since the epoch.
    """
    ranks = examination.ranks
    if ranks.world_size == 1:
        return []  # What is left out, the check of links says.
    # A message of each node's first rank is enough, because the ranks of a node share its clock.
    others = [node[0] for node in ranks.of_nodes] if len(ranks.of_nodes) > 1 else list(range(ranks.world_size))
    offsets: dict[int, Offset] = {}
    for other in others[1:]:
        if ranks.rank == 0:
            offsets[other] = _offset_of(other, clock, ranks.device)
        elif ranks.rank == other:
            _answer(clock, ranks.device)
    offsets = ranks.gather(offsets)[0]
    rank, worst = max(offsets.items(), key=lambda item: abs(item[1].seconds))
    seen = (
        f"The clock of {ranks.named([rank])} is {_described(worst)} that of {ranks.named([0])}"
        f"{', and no other is further away' if len(offsets) > 1 else ''}."
    )
    wrong = {rank: offset for rank, offset in offsets.items() if _least(offset) > LARGEST_SKEW_S}
    if wrong:
        return [
            Finding(
                "clocks",
                "warn",
                f"{seen} More than {LARGEST_SKEW_S:g} s away: {ranks.named(wrong)}. Lines of logs and points of metrics"
                " are then out of order, and `ckpt_path: auto`, which resumes the checkpoint that was saved last,"
                " may resume an older one when rank 0 moves to another node.",
                "Let chrony or another client of NTP run on all nodes (`chronyc tracking`, `timedatectl`).",
            )
        ]
    unknown = max(offset.uncertainty_s for offset in offsets.values())
    if unknown > LARGEST_SKEW_S:
        return [
            Finding(
                "clocks",
                "warn",
                f"{seen} The messages took so long that a difference of {unknown:.1f} s could not be told.",
                "Look at the links, and run the command again when the nodes are less busy.",
            )
        ]
    return [Finding("clocks", "pass", seen)]


def _least(offset: Offset) -> float:
    return abs(offset.seconds) - offset.uncertainty_s


def _described(offset: Offset) -> str:
    side = "ahead of" if offset.seconds >= 0 else "behind"
    return f"{seconds_text(abs(offset.seconds))} (± {seconds_text(offset.uncertainty_s)}) {side}"


def _offset_of(other: int, clock: Callable[[], int], device: torch.device) -> Offset:
    """Exchange messages with a rank, which calls :func:`_answer`, and return by how much its clock is ahead."""
    best = Offset(0.0, float("inf"))
    for _ in range(_NUM_EXCHANGES):
        times = torch.zeros(2, dtype=torch.int64, device=device)
        sent = clock()
        dist.send(times, other)
        dist.recv(times, other)
        arrived, answered = times.tolist()
        received = clock()
        uncertainty = ((received - sent) - (answered - arrived)) / 2e9
        if uncertainty < best.uncertainty_s:
            best = Offset(((arrived - sent) + (answered - received)) / 2e9, uncertainty)
    return best


def _answer(clock: Callable[[], int], device: torch.device) -> None:
    """Answer the messages of rank 0 with the times at which they arrived and are answered."""
    for _ in range(_NUM_EXCHANGES):
        times = torch.zeros(2, dtype=torch.int64, device=device)
        dist.recv(times, 0)
        times.tolist()  # An accelerator has received the message when it can be read.
        arrived = clock()
        dist.send(torch.tensor([arrived, clock()], device=device), 0)
