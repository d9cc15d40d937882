"""Measure two sides in turn, and compare their figures."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Semaphore, Thread

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "LOSS_TOLERANCE",
    "LOSS_TOLERANCE_BFLOAT16",
    "EndStep",
    "Pace",
    "Pairs",
    "Train",
    "alternate",
    "average_orders",
    "compare_steps",
    "median_interval",
]

EndStep = Callable[[Tensor], bool]
"""Function that a training run calls with the loss after every optimizer step; the run ends when it returns False."""

Train = Callable[[EndStep], None]
"""Function that runs a whole training, including the construction of the model."""

LOSS_TOLERANCE = {0: 1e-5, 8: 1e-4, 32: 1e-3}
"""The largest accepted difference of the two sides' losses, by the number of the step.

Sums in a different order round differently, and training amplifies the differences, so the tolerance grows with the
step. Later steps cannot be compared.
"""

LOSS_TOLERANCE_BFLOAT16 = {0: 2e-2, 8: 5e-2, 32: 1e-1}
"""The same if at least one side computes in bfloat16, which has 8 significant bits."""


@dataclass
class Pairs:
    """Hold pairs of figures, one figure of each side.

    Args:
        ours: Figures of the first side.
        theirs: Figures of the second side, in the same order.
        by: Function that compares the figures of a pair, called with ours first: division or subtraction.
    """

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    by: Callable[[float, float], float] = operator.truediv

    def __len__(self) -> int:
        return len(self.ours)

    @property
    def compared(self) -> list[float]:
        """Return the ratio or the difference of each pair."""
        return [self.by(a, b) for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def median(self) -> float:
        """Return the median of :attr:`compared`."""
        return median(self.compared)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95% confidence interval of the median; None with fewer than six pairs."""
        return median_interval(self.compared)


@dataclass(frozen=True)
class Pace:
    """Configure how long two sides take turns.

    Args:
        min_pairs: Smallest number of pairs to measure.
        max_width: Largest accepted width of the interval of the median; more pairs are measured until it is reached.
        max_seconds: Time in seconds after which to stop even if the interval is wider.
        steps: Number of training steps in a turn.
        warmup_turns: Number of turns of each side that are not counted.
    """

    min_pairs: int
    max_width: float
    max_seconds: float
    steps: int = 1
    warmup_turns: int = 6

    def stop_rule(self) -> Callable[[Pairs], bool]:
        """Return a function that decides whether pairs are enough; ``max_seconds`` count from this call."""
        deadline = time.monotonic() + self.max_seconds

        def is_enough(pairs: Pairs) -> bool:
            if len(pairs) and time.monotonic() > deadline:
                return True
            return len(pairs) >= self.min_pairs and self.is_narrow(pairs.interval)

        return is_enough

    def is_narrow(self, interval: tuple[float, float] | None) -> bool:
        """Return whether an interval is at most ``max_width`` wide; False for None, which means too few pairs."""
        return interval is not None and interval[1] - interval[0] <= self.max_width


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: Pairs, is_enough: Callable[[Pairs], bool]
) -> Pairs:
    """Measure both sides in turn until ``is_enough(pairs)``, and append the figures to ``pairs``.

    The order of the sides is swapped from pair to pair.
    """
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


def average_orders(one: Pairs, other: Pairs) -> Pairs:
    """Average the pairs of two measurements, which differ in the order in which the sides were built.

    Each figure is the geometric mean of the two measurements' figures.
    """

    def mean(some: Sequence[float], others: Sequence[float]) -> list[float]:
        return [math.sqrt(a * b) for a, b in zip(some, others, strict=False)]

    return Pairs(mean(one.ours, other.ours), mean(one.theirs, other.theirs))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return a confidence interval of the median, for any distribution of the values.

    Its ends are two of the sorted values, as close to the middle as the binomial distribution allows (Conover,
    Practical Nonparametric Statistics, section 3.2). It is None if there are too few values; a confidence of 0.95 needs
    six.
    """
    ordered, n = sorted(values), len(values)
    probability, num_below = 0.0, 0
    while (probability := probability + math.comb(n, num_below) / 2**n) <= (1 - confidence) / 2:
        num_below += 1
    return (ordered[num_below - 1], ordered[n - num_below]) if num_below else None


class PausableTraining:
    """Run a training in a thread of its own, which proceeds only during :meth:`run_steps`.

    The Trainer's loop cannot be left and entered again, so two trainings can only take turns in two threads.
    """

    def __init__(self, train: Train) -> None:
        self.losses: list[Tensor] = []
        self._train = train
        self._steps_left = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._my_turn, self._turn_over = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def run_steps(self, num_steps: int) -> None:
        """Run ``num_steps`` steps; the first call also builds the model."""
        self._steps_left = num_steps
        self._hand_over()
        assert self._steps_left == 0, f"the run ended by itself, {self._steps_left} steps before its turn was over"

    def finish(self) -> None:
        """End the run without another step."""
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
        self.losses.append(loss.detach())
        self._steps_left -= 1
        if self._steps_left == 0:
            loss.item()  # This waits for the device, as the time of a turn includes all of its steps.
            self._turn_over.release()
            self._my_turn.acquire()
        return not self._is_over


def compare_steps(
    ours: Train,
    theirs: Train,
    pace: Pace,
    is_ours_first: bool,
    loss_tolerance: Mapping[int, float] = LOSS_TOLERANCE,
) -> Pairs:
    """Let two training runs take turns in this process, and time each turn between two barriers.

    This is a collective. Rank 0 decides when there are enough pairs, because the ranks' clocks differ.

    Args:
        ours: Training run whose figure is the first of each pair.
        theirs: Training run whose figure is the second of each pair.
        pace: Number of steps in a turn, and rule for the number of pairs.
        is_ours_first: Whether ``ours`` is built first. The run that is built first may be slower by a twentieth
            throughout, because its memory is allocated elsewhere. A comparison therefore takes the mean of both orders
            (:func:`average_orders`).
        loss_tolerance: Largest accepted difference of the losses, by the number of the step.

    Returns:
        Pairs of seconds per step.

    Raises:
        AssertionError: If the losses of the runs differ in the first steps, that is, they did not do the same work.
    """
    trainings = PausableTraining(ours), PausableTraining(theirs)
    for _ in range(pace.warmup_turns):
        for training in trainings if is_ours_first else reversed(trainings):
            training.run_steps(pace.steps)
    is_enough = pace.stop_rule()

    def rank_zero_has_enough(pairs: Pairs) -> bool:
        answer = torch.tensor([is_enough(pairs)])
        dist.broadcast(answer, src=0)
        return bool(answer)

    def turn(training: PausableTraining) -> float:
        dist.barrier()
        start = time.perf_counter()
        training.run_steps(pace.steps)
        dist.barrier()
        return (time.perf_counter() - start) / pace.steps

    pairs = alternate(lambda: turn(trainings[0]), lambda: turn(trainings[1]), Pairs(), rank_zero_has_enough)
    for training in trainings:
        training.finish()
    for step, tolerance in loss_tolerance.items():
        losses = torch.tensor([float(training.losses[min(step, len(training.losses) - 1)]) for training in trainings])
        dist.all_reduce(losses)  # Ranks may have other parts of the batch on one side than on the other.
        our_loss, their_loss = (losses / dist.get_world_size()).tolist()
        assert abs(our_loss - their_loss) <= tolerance, (
            f"the runs have different losses at step {step}, {our_loss:.6f} and {their_loss:.6f}: they do not do the"
            " same work"
        )
    return pairs
