"""When each forward and backward of a pipeline's step ran, on every rank, and the part of the time that ranks waited.

The *bubble* is 1 - busy time / (number of ranks x makespan): the part of the whole, not of the ideal. Busy is what
forwards and backwards take; the makespan goes from the first start to the last end, on any rank.

Ranks have clocks of their own. They are aligned by what every clock has seen, the step's messages: an activation is
not received before it was sent, nor is a gradient. Between neighbours both go, in both directions, so that the
difference of their clocks lies between two bounds, as in NTP (Mills, 1991); its middle is taken. It is wrong by less
than a message takes, as at the start and at the end of a step a rank waits for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

__all__ = ["KINDS", "Action", "Kind", "Order", "Recorder", "Span", "TimedStage", "Timeline", "aligned"]

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward; or a backward in two parts: of the input, of the weights. torch's letters."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind
    stage: int
    microbatch: int


Order = Sequence[Sequence[Action]]
"""What each rank does, in order."""


@dataclass(frozen=True)
class Span:
    """When an action ran, in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What the ranks of a pipeline did in one step, on one clock.

    Args:
        num_ranks: How many there are.
        spans: What each did, in order of the starts.
    """

    num_ranks: int
    spans: Sequence[Span]

    @property
    def start(self) -> float:
        """When the first action began."""
        return min(span.start for span in self.spans)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, over all ranks."""
        return max(span.end for span in self.spans) - self.start

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they ran neither a forward nor a backward: 0 to 1."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.num_ranks * self.makespan)


class Recorder:
    """Keeps when this rank's forwards and backwards of the latest step ran.

    On CUDA by events, which wait for nothing; they are made once and used in every step.

    Args:
        device: Where the stages are.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._events: list[Any] = []
        self._num_events = 0
        self._actions: list[tuple[Action, Any, Any]] = []

    def begin(self) -> None:
        """Forget the step before."""
        self._actions, self._num_events = [], 0

    def now(self) -> Any:
        """A moment, to be given to :meth:`add`."""
        if not self._is_cuda:
            return perf_counter()
        if self._num_events == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._num_events]
        self._num_events += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, kind: Kind, stage: int, microbatch: int, start: Any) -> None:
        """Keep that an action, which began at ``start``, ends now."""
        self._actions.append((Action(kind, stage, microbatch), start, self.now()))

    def spans(self, rank: int) -> list[Span]:
        """What was kept, by a clock of this rank. On CUDA this waits until the last action has run."""
        if not self._actions:
            return []
        first = self._actions[0][1]
        if not self._is_cuda:
            return [Span(rank, action, start - first, end - first) for action, start, end in self._actions]
        self._actions[-1][2].synchronize()
        return [
            Span(rank, action, first.elapsed_time(start) / 1000, first.elapsed_time(end) / 1000)
            for action, start, end in self._actions
        ]

    def timeline(self, order: Order, group: dist.ProcessGroup) -> Timeline | None:
        """What all ranks of the pipeline have kept of the latest step; None: some have nothing. A collective.

        Args:
            order: What each rank was to do.
            group: The ranks of the pipeline.
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
    """A stage that tells ``recorder`` when its actions run: after what they wait for, before what they send.

    Attributes:
        recorder: Keeps the times.
        run_backward: Runs a backward, given the stage, the microbatch and what runs it; None in its place of what that
            returns: no gradient was made.
    """

    recorder: Recorder
    run_backward: Callable[[int, int, Callable[[], Any]], Any]
    _microbatch = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        start = self.recorder.now()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.recorder.add("F", self.stage_index, fwd_chunk_id, start)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a backward, or its part for the input."""
        start = self.recorder.now()
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.recorder.add("B" if full_backward else "I", self.stage_index, bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run a backward's part for the weights."""
        start = self.recorder.now()
        self._microbatch = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.recorder.add("W", self.stage_index, bwd_chunk_id, start)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run autograd; after an error, return no gradients, in whose place torch's stage sends zeros."""
        backward = partial(super().backward_maybe_with_nosync, backward_type, bwd_kwargs, last_backward)
        result = self.run_backward(self.stage_index, self._microbatch, backward)
        return ((None,) * len(bwd_kwargs.get("input_values", ())), None) if result is None else result


def aligned(timeline: Timeline) -> Timeline:
    """``timeline``, whose ranks have each a clock of their own, on the clock of rank 0, from 0 on."""
    times = {span.action: span for span in timeline.spans}
    # earliest[a, b]: what has to be added to the times of b so that nothing of a arrives there before it was sent.
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
    """The actions of other stages that may have sent what ``action`` needs."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)]
    if kind == "W":
        return []
    return [Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)]
