"""Two sides measured in turn, and what their figures say of each other."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Semaphore, Thread

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["EndStep", "Pace", "Pairs", "Train", "alternate", "compare_steps", "median_interval", "of_both_orders"]

EndStep = Callable[[Tensor], bool]
"""What a training run calls after every optimizer step, with the step's loss; at False the run ends."""

Train = Callable[[EndStep], None]
"""A training run, from building the model to its end."""

LOSS_TOLERANCE = {0: 1e-5, 8: 1e-4, 32: 1e-3}
"""By step: sums of another order round otherwise, and training makes that grow; later nothing can be told from it."""


@dataclass
class Pairs:
    """Figures of two sides, one of each a pair.

    Args:
        ours: One side's figures.
        theirs: The other's.
        by: How a pair is made one number, ours first: divided or subtracted.
    """

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    by: Callable[[float, float], float] = operator.truediv

    def __len__(self) -> int:
        return len(self.ours)

    @property
    def compared(self) -> list[float]:
        """One number a pair."""
        return [self.by(a, b) for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def median(self) -> float:
        """The median of :attr:`compared`."""
        return median(self.compared)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Its 95% interval; None with fewer than six pairs."""
        return median_interval(self.compared)


@dataclass(frozen=True)
class Pace:
    """How long two sides take turns.

    Args:
        min_pairs: Pairs to measure at least.
        max_width: Go on until the interval of the median is this narrow.
        max_seconds: Stop after this long even so.
        steps: Training steps in a turn.
        warmup_turns: Turns of each side that are not counted.
    """

    min_pairs: int
    max_width: float
    max_seconds: float
    steps: int = 1
    warmup_turns: int = 6

    def stop_rule(self) -> Callable[[Pairs], bool]:
        """Whether these pairs are enough, by a clock that starts now."""
        deadline = time.monotonic() + self.max_seconds

        def is_enough(pairs: Pairs) -> bool:
            if len(pairs) and time.monotonic() > deadline:
                return True
            return len(pairs) >= self.min_pairs and self.is_narrow(pairs.interval)

        return is_enough

    def is_narrow(self, interval: tuple[float, float] | None) -> bool:
        """Whether an interval is as narrow as asked for; None, of too few pairs, is not."""
        return interval is not None and interval[1] - interval[0] <= self.max_width


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: Pairs, is_enough: Callable[[Pairs], bool]
) -> Pairs:
    """Measure both sides in turn, the order swapped from pair to pair, until ``is_enough``."""
    while not is_enough(pairs):
        if len(pairs) % 2 == 0:
            a = ours()
            b = theirs()
        else:
            b = theirs()
            a = ours()
        pairs.ours.append(a)
        pairs.theirs.append(b)
    return pairs


def of_both_orders(one: Pairs, other: Pairs) -> Pairs:
    """Pairs of figures that are each the geometric mean of two, one of either order of building the sides."""

    def mean(some: Sequence[float], others: Sequence[float]) -> list[float]:
        return [math.sqrt(a * b) for a, b in zip(some, others, strict=False)]

    return Pairs(mean(one.ours, other.ours), mean(one.theirs, other.theirs))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The interval that holds the median with at least ``confidence``, whatever the values' distribution.

    Two of the sorted values, as far in as the binomial distribution allows (Conover, Practical Nonparametric
    Statistics, section 3.2). None: there are too few values; 0.95 needs six.
    """
    ordered, n = sorted(values), len(values)
    probability, num_below = 0.0, 0
    while (probability := probability + math.comb(n, num_below) / 2**n) <= (1 - confidence) / 2:
        num_below += 1
    return (ordered[num_below - 1], ordered[n - num_below]) if num_below else None


class Player:
    """A training run in a thread of its own, which moves only inside :meth:`play`.

    The Trainer's loop cannot be left and entered again, so two of them can only take turns as two threads.
    """

    def __init__(self, train: Train) -> None:
        self.losses: list[float] = []
        self._train = train
        self._steps_left = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._my_turn, self._turn_over = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def play(self, num_steps: int) -> None:
        """Run ``num_steps`` steps; the first call builds the run, too."""
        self._steps_left = num_steps
        self._hand_over()
        assert self._steps_left == 0, f"the run ended by itself, {self._steps_left} steps before its turn was over"

    def finish(self) -> None:
        """Let the run end, without another step."""
        self._is_over = True
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
        return not self._is_over


def compare_steps(ours: Train, theirs: Train, pace: Pace, is_ours_first: bool) -> Pairs:
    """Let two training runs take turns in this process, and time each turn between two barriers.

    To be called on every rank of a process group. Rank 0 says when it is enough: the ranks' clocks differ.

    Args:
        ours: One run.
        theirs: The other.
        pace: How long.
        is_ours_first: Which is built first. It may be slower by a twentieth for good, whichever it is: what it
            allocates lies elsewhere. So a comparison takes the mean of both orders (:func:`of_both_orders`).

    Returns:
        Seconds a step.

    Raises:
        AssertionError: If the runs' losses differ in the first steps: they did not do the same work.
    """
    players = Player(ours), Player(theirs)
    for _ in range(pace.warmup_turns):
        for player in players if is_ours_first else reversed(players):
            player.play(pace.steps)
    is_enough = pace.stop_rule()

    def rank_zero_has_enough(pairs: Pairs) -> bool:
        answer = torch.tensor([is_enough(pairs)])
        dist.broadcast(answer, src=0)
        return bool(answer)

    def turn(player: Player) -> float:
        dist.barrier()
        start = time.perf_counter()
        player.play(pace.steps)
        dist.barrier()
        return (time.perf_counter() - start) / pace.steps

    pairs = alternate(lambda: turn(players[0]), lambda: turn(players[1]), Pairs(), rank_zero_has_enough)
    for player in players:
        player.finish()
    for step, tolerance in LOSS_TOLERANCE.items():
        our_loss, their_loss = (player.losses[min(step, len(player.losses) - 1)] for player in players)
        assert abs(our_loss - their_loss) <= tolerance, (
            f"the runs have different losses at step {step}, {our_loss:.6f} and {their_loss:.6f}: they do not do the"
            " same work"
        )
    return pairs
