"""List torch's pipeline schedules by the names that users give, with the requirements of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, get_schedule_class

from lightning_dist.mesh.timeline import Action, Kind, Order

__all__ = ["SCHEDULES", "Schedule", "order_of", "stages_of"]


@dataclass(frozen=True)
class Schedule:
    """Describe one of torch's schedules and the placement of stages that it needs.

    Args:
        torch_name: The name by which ``get_schedule_class`` finds the schedule.
        virtual_stages: The default number of stages on a rank, which is also the minimum.
        is_v: Whether the stages are placed in the form of a V, so that a rank's second stage mirrors its first; else
            they are placed round-robin.
        fallback: The name of the schedule that is used instead where there are too few microbatches for this one.
    """

    torch_name: str
    virtual_stages: int = 1
    is_v: bool = False
    fallback: str = "gpipe"

    @property
    def torch_class(self) -> type:
        """Return the schedule's class in :mod:`torch.distributed.pipelining`."""
        return get_schedule_class(self.torch_name)  # type: ignore[no-any-return]

    @property
    def allows_more_stages(self) -> bool:
        """Return whether a rank may have more stages than ``virtual_stages``."""
        return self.virtual_stages > 1 and not self.is_v

    def fits(self, num_microbatches: int, pp_size: int, num_stages: int) -> bool:
        """Return whether the schedule can run this number of microbatches.

        Args:
            num_microbatches: The number of microbatches in a step.
            pp_size: The number of ranks of the pipeline.
            num_stages: The number of stages on all ranks.
        """
        if self.torch_name in ("1F1B", "DualPipeV"):
            return num_microbatches >= num_stages
        if self.torch_name.startswith("Interleaved"):
            return num_microbatches % max(1, num_microbatches // pp_size) == 0
        return True


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "interleaved_1f1b": Schedule("Interleaved1F1B", 2, fallback="looped_bfs"),
    "looped_bfs": Schedule("LoopedBFS", 2),
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", 2, fallback="looped_bfs"),
    "zbv": Schedule("ZBVZeroBubble", 2, is_v=True),
    "dualpipev": Schedule("DualPipeV", 2, is_v=True, fallback="zbv"),
}
"""The schedules by name: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., 2019), interleaved 1F1B (Narayanan et al.,
2021), breadth-first (Lamy-Poirier, 2023), zero bubble (Qi et al., 2024), DualPipeV (DeepSeek-AI, 2025)."""


def stages_of(rank: int, pp_size: int, virtual_stages: int, is_v: bool) -> list[int]:
    """Return the stages on ``rank``, in order.

    Args:
        rank: The rank's index in the pipeline.
        pp_size: The number of ranks of the pipeline.
        virtual_stages: The number of stages on a rank.
        is_v: Whether the stages are placed in the form of a V (see :class:`Schedule`).
    """
    if is_v:
        return [rank, 2 * pp_size - 1 - rank]
    return [rank + turn * pp_size for turn in range(virtual_stages)]


def order_of(schedule: Any, pp_size: int, num_microbatches: int) -> Order:
    """Return the actions of each rank under ``schedule``, in order.

    Args:
        schedule: A schedule of :mod:`torch.distributed.pipelining` that runs backwards.
        pp_size: The number of ranks of the pipeline.
        num_microbatches: The number of microbatches in a step.
    """
    numbers = range(num_microbatches)
    if isinstance(schedule, ScheduleGPipe):
        return [[Action(kind, rank, n) for kind in ("F", "B") for n in numbers] for rank in range(pp_size)]
    if isinstance(schedule, Schedule1F1B):
        # The schedule's own _get_pipeline_order is not used, because it numbers the last rank's forwards from 1
        # (torch 2.13).
        return [_one_forward_one_backward(rank, pp_size, num_microbatches) for rank in range(pp_size)]
    return [[_action(found) for found in _flat(schedule.pipeline_order[rank])] for rank in range(pp_size)]


def _one_forward_one_backward(rank: int, pp_size: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_microbatches, pp_size - rank)
    order = [Action("F", rank, n) for n in range(warmup)]
    for n in range(num_microbatches):
        order.append(Action("B", rank, n))
        if n + warmup < num_microbatches:
            order.append(Action("F", rank, n + warmup))
    return order


def _flat(actions: Any) -> Iterator[Any]:
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


def _action(found: Any) -> Action:
    return Action(cast(Kind, found.computation_type.value), found.stage_index, found.microbatch_index)
