"""Record when each forward and backward of a pipeline's step ran on every rank, and compute the bubble.

The *bubble* is 1 - busy time / (number of ranks x makespan), that is, a fraction of the total time and not of the ideal
time. The busy time is the time that forwards and backwards take; the makespan is the time from the first start to the
last end on any rank.

Each rank has its own clock. The clocks are aligned by the step's messages: neither an activation nor a gradient is
received before it was sent. Neighbours send each other activations in one direction and gradients in the other, so that
the difference of their clocks has a lower and an upper bound, as in NTP (Mills, 1991). The middle between the bounds is
used. The error of this estimate is less than the time of one message, because a rank waits for a message at the start
of a step and at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from lightning_dist.mesh.device_clock import DeviceClock

__all__ = ["KINDS", "Action", "Kind", "Order", "Recorder", "Span", "TimedStage", "Timeline", "aligned"]

Kind = Literal["F", "B", "I", "W"]
"""Kind of an action, by torch's letters: forward, backward, or the part of a backward for the input or the weights."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """Identify one forward or backward of a stage on a microbatch."""

    kind: Kind
    stage: int
    microbatch: int


Order = Sequence[Sequence[Action]]
"""The actions of each rank, in the order in which the rank runs them."""


@dataclass(frozen=True)
class Span:
    """Hold the start and end time, in seconds, of an action on a rank."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Hold the actions that the ranks of a pipeline ran in one step.

    Args:
        num_ranks: The number of ranks of the pipeline.
        spans: The actions of all ranks, in the order of their starts, with times on one clock. In the argument of
            :func:`aligned` they are in any order, and each rank's times are on a clock of its own.
    """

    num_ranks: int
    spans: Sequence[Span]

    @property
    def start(self) -> float:
        """Return the time at which the first action began, in seconds."""
        return min(span.start for span in self.spans)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first start to the last end, over all ranks."""
        return max(span.end for span in self.spans) - self.start

    def seconds(self, kinds: str) -> float:
        """Return the seconds that actions of ``kinds``, such as ``"F"`` or ``"BIW"``, took on all ranks together."""
        return sum(span.end - span.start for span in self.spans if span.action.kind in kinds)

    @property
    def bubble(self) -> float:
        """Return the fraction of the ranks' time, 0 to 1, in which they ran neither a forward nor a backward."""
        return 1 - self.seconds("FBIW") / (self.num_ranks * self.makespan)


class Recorder:
    """Record when this rank's forwards and backwards of the latest step ran.

    On CUDA the times are recorded by events, which do not synchronize; the events are created once and used again in
    every step.

    Args:
        device: The device of this rank's stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = DeviceClock(device)
        self._actions: list[tuple[Action, Any, Any]] = []
        self.num_bytes_sent = 0
        """Number of bytes that this rank has sent to other stages, in all steps."""

    def begin(self) -> None:
        """Discard the actions of the previous step."""
        self._actions = []
        self._clock.forget()

    def now(self) -> Any:
        """Return the current point in time, for :meth:`add`."""
        return self._clock.now()

    def add(self, kind: Kind, stage: int, microbatch: int, start: Any) -> None:
        """Record that an action ends now.

        Args:
            kind: Whether the action is a forward, a backward, or a part of a backward (see :data:`Kind`).
            stage: Index of the stage in the pipeline.
            microbatch: Index of the microbatch in the step.
            start: The result of :meth:`now` when the action began.
        """
        self._actions.append((Action(kind, stage, microbatch), start, self.now()))

    def spans(self, rank: int) -> list[Span]:
        """Return the recorded actions, with times in seconds since this rank's first action began.

        On CUDA this waits until the last action has run.

        Args:
            rank: This rank's index in the pipeline, for the result.
        """
        if not self._actions:
            return []
        first, since = self._actions[0][1], self._clock.seconds
        self._clock.wait_for(self._actions[-1][2])
        return [Span(rank, action, since(first, start), since(first, end)) for action, start, end in self._actions]

    def timeline(self, order: Order, group: dist.ProcessGroup) -> Timeline | None:
        """Gather the latest step's actions from all ranks, and align their clocks. This is a collective over ``group``.

        Args:
            order: For each rank, the actions that it was to run, in order; the same on all ranks.
            group: Process group of the pipeline's ranks, for collectives.

        Returns:
            The timeline, or None if an action of any rank was not recorded.
        """
        rank = dist.get_rank(group)
        own = {span.action: (span.start, span.end) for span in self.spans(rank)}
        times = torch.full((max(map(len, order)), 2), math.nan, dtype=torch.float64)
        for index, action in enumerate(order[rank]):
            if action in own:
                times[index] = torch.tensor(own[action], dtype=torch.float64)
        times = times.to(self._device)
        gathered = [torch.empty_like(times) for _ in order]
        dist.all_gather(gathered, times, group=group)
        spans = [
            Span(other, action, start, end)
            for other, (actions, known) in enumerate(zip(order, gathered, strict=True))
            for action, (start, end) in zip(actions, known.tolist(), strict=False)
        ]
        return None if any(math.isnan(span.end) for span in spans) else aligned(Timeline(len(order), spans))


class TimedStage(PipelineStage):
    """Record the times of a stage's actions, excluding the time in which the rank waits for messages or sends them.

    Attributes:
        recorder: Recorder of this rank, to which the times are added.
        run_backward: Function that runs a backward, given the stage, the microbatch, and a function that runs autograd.
            It returns the result of that function, or None if no gradients were computed.
    """

    recorder: Recorder
    run_backward: Callable[[int, int, Callable[[], Any]], Any]
    _microbatch = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and record its time."""
        start = self.recorder.now()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.recorder.add("F", self.stage_index, fwd_chunk_id, start)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a whole backward, or only its part for the input, and record its time."""
        start = self.recorder.now()
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.recorder.add("B" if full_backward else "I", self.stage_index, bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the part of a backward for the weights, and record its time."""
        start = self.recorder.now()
        self._microbatch = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.recorder.add("W", self.stage_index, bwd_chunk_id, start)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a forward's output, and count their bytes."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a backward's gradients, and count their bytes."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        self.recorder.num_bytes_sent += sum(send.tensor.nbytes for send in sends)
        return sends

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run autograd; after an error, return None for every gradient, so that torch's stage sends zeros."""
        backward = partial(super().backward_maybe_with_nosync, backward_type, bwd_kwargs, last_backward)
        result = self.run_backward(self.stage_index, self._microbatch, backward)
        return ((None,) * len(bwd_kwargs.get("input_values", ())), None) if result is None else result


def aligned(timeline: Timeline) -> Timeline:
    """Convert the times of all ranks to the clock of rank 0, and shift them so that the first action starts at 0.

    Args:
        timeline: A timeline in which each rank's times are from a clock of its own.
    """
    times = {span.action: span for span in timeline.spans}
    # earliest[a, b] is the least shift of rank b's times with which no message from rank a arrives before it was sent.
    earliest: dict[tuple[int, int], float] = {}
    for action, span in times.items():
        for needed in messages(action):
            sent = times.get(needed)
            if sent is not None and sent.rank != span.rank:
                ranks = (sent.rank, span.rank)
                earliest[ranks] = max(earliest.get(ranks, -math.inf), sent.end - span.start)
    shifts = [0.0]
    for rank, following in pairwise(range(timeline.num_ranks)):
        bounds = [earliest.get((rank, following)), earliest.get((following, rank))]
        low, high = (bounds[0], None if bounds[1] is None else -bounds[1])
        known = [bound for bound in (low, high) if bound is not None]
        shifts.append(shifts[-1] + (sum(known) / len(known) if known else 0.0))
    spans = [
        replace(span, start=span.start + shifts[span.rank], end=span.end + shifts[span.rank]) for span in timeline.spans
    ]
    first = min(span.start for span in spans)
    spans = [replace(span, start=span.start - first, end=span.end - first) for span in spans]
    return Timeline(timeline.num_ranks, sorted(spans, key=lambda span: (span.start, span.rank)))


def messages(action: Action) -> list[Action]:
    """Return the actions of neighbouring stages that may have sent the input of ``action``."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)]
    if kind == "W":
        return []
    return [Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)]
