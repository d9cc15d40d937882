"""Two training runs in the same processes, taking turns, and what their times say of each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from threading import Semaphore, Thread

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Comparison", "EndStep", "Pace", "Train", "compare", "median_interval"]

EndStep = Callable[[Tensor], bool]
"""What a run calls after every optimizer step, with the step's loss; it ends when the answer is False."""

Train = Callable[[EndStep], None]
"""A training run, from building the model to its end."""

LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Pace:
    """How long two runs take turns.

    Args:
        steps: Steps in a turn.
        min_pairs: Pairs of turns to measure at least.
        max_width: Go on until the interval of the median ratio is this narrow.
        max_seconds: Stop after this long even so.
        warmup_turns: Turns of each run that are not measured.
    """

    steps: int = 4
    min_pairs: int = 20
    max_width: float = 0.04
    max_seconds: float = 300.0
    warmup_turns: int = 2


@dataclass(frozen=True)
class Comparison:
    """What two runs took for the same work.

    Args:
        ours: Seconds a step, one figure a turn.
        theirs: The other run's, turn by turn.
        loss_difference: How far the two losses were apart after the last step, on the rank where they were furthest.
    """

    ours: list[float]
    theirs: list[float]
    loss_difference: float


class Player:
    """A training run in a thread of its own, which moves only inside :meth:`play`.

    The Trainer's loop cannot be left and entered again, so two of them can only take turns as two threads.
    """

    def __init__(self, train: Train) -> None:
        self.losses: list[float] = []
        self._train = train
        self._steps_left = 0
        self._finished = False
        self._error: BaseException | None = None
        self._my_turn, self._turn_over = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def play(self, num_steps: int) -> None:
        """Run ``num_steps`` steps; the first call builds the run, too."""
        self._steps_left = num_steps
        self._hand_over()
        if not self._thread.is_alive() and not self._finished:
            raise RuntimeError("A run ended before it was told to.")

    def finish(self) -> None:
        """Let the run end, without another step."""
        self._finished = True
        self._hand_over()
        self._thread.join()

    def _hand_over(self) -> None:
        self._my_turn.release()
        self._turn_over.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._my_turn.acquire()
        try:
            self._train(self._end_step)
        except BaseException as error:
            self._error = error
        self._turn_over.release()

    def _end_step(self, loss: Tensor) -> bool:
        self.losses.append(loss.item())
        self._steps_left -= 1
        if self._steps_left == 0:
            self._turn_over.release()
            self._my_turn.acquire()
        return not self._finished


def compare(ours: Train, theirs: Train, pace: Pace) -> Comparison:
    """Let two runs take turns, the order swapped from pair to pair, and time each turn between two barriers.

    To be called on every rank of a process group.

    Raises:
        AssertionError: If the runs did not start or end at the same loss: they did not do the same work.
    """
    players = Player(ours), Player(theirs)
    for _ in range(pace.warmup_turns):
        for player in players:
            player.play(pace.steps)
    times: tuple[list[float], list[float]] = [], []
    deadline = time.perf_counter() + pace.max_seconds
    while not _agreed(_is_enough(*times, pace) or time.perf_counter() > deadline):
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        for index in order:
            times[index].append(_timed(players[index], pace.steps))
    for player in players:
        player.finish()
    first, last = (abs(players[0].losses[step] - players[1].losses[step]) for step in (0, -1))
    assert max(first, last) <= LOSS_TOLERANCE, (
        f"the losses differ by {first:.2g} after the first step and by {last:.2g} after the last:"
        f" {players[0].losses[0]:.5f} to {players[0].losses[-1]:.5f} against"
        f" {players[1].losses[0]:.5f} to {players[1].losses[-1]:.5f}"
    )
    return Comparison(times[0], times[1], last)


def _timed(player: Player, num_steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    player.play(num_steps)
    dist.barrier()
    return (time.perf_counter() - start) / num_steps


def _is_enough(ours: Sequence[float], theirs: Sequence[float], pace: Pace) -> bool:
    if len(ours) < pace.min_pairs:
        return False
    interval = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    return interval is None or interval[1] - interval[0] <= pace.max_width


def _agreed(stop: bool) -> bool:
    """Rank 0's answer: the clocks of the ranks differ."""
    answer = torch.tensor([stop])
    dist.broadcast(answer, src=0)
    return bool(answer)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The interval that holds the median with at least ``confidence``, whatever the distribution.

    Two of the sorted values, as far in as the binomial distribution allows (Conover, Practical Nonparametric
    Statistics, section 3.2). None: there are too few values; 0.95 needs six.
    """
    values = sorted(values)
    n = len(values)
    tail, outside = (1 - confidence) / 2, 0.0
    for below in range(n):
        outside += math.comb(n, below) / 2**n
        if outside > tail:
            return None if below == 0 else (values[below - 1], values[n - below])
    return None


def ratio(comparison: Comparison) -> float:
    """The median of the turns' ratios, ours to theirs."""
    return median(a / b for a, b in zip(comparison.ours, comparison.theirs, strict=True))
