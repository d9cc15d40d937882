"""The schedules: torch's own, by the names that users give, and what each asks for."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.pipelining.schedules import get_schedule_class

__all__ = ["SCHEDULES", "Schedule", "stages_of"]


@dataclass(frozen=True)
class Schedule:
    """A schedule.

    Args:
        torch_name: What ``get_schedule_class`` calls it.
        virtual_stages: How many stages a rank has if nobody says; the least, too.
        is_v: Whether a rank's second stage mirrors its first (else they go round).
        for_few: The one that runs as many microbatches as there are, where they are too few for this.
    """

    torch_name: str
    virtual_stages: int = 1
    is_v: bool = False
    for_few: str = "gpipe"

    @property
    def torch_class(self) -> type:
        """Of :mod:`torch.distributed.pipelining`."""
        return get_schedule_class(self.torch_name)  # type: ignore[no-any-return]

    @property
    def takes_many(self) -> bool:
        """Whether a rank may have any number of stages."""
        return self.virtual_stages > 1 and not self.is_v

    def fits(self, num_microbatches: int, pp_size: int, num_stages: int) -> bool:
        """Whether it runs so many microbatches."""
        if self.torch_name in ("1F1B", "DualPipeV"):
            return num_microbatches >= num_stages
        if self.torch_name.startswith("Interleaved"):
            return num_microbatches % max(1, num_microbatches // pp_size) == 0
        return True


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "interleaved_1f1b": Schedule("Interleaved1F1B", 2, for_few="looped_bfs"),
    "looped_bfs": Schedule("LoopedBFS", 2),
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", 2, for_few="looped_bfs"),
    "zbv": Schedule("ZBVZeroBubble", 2, is_v=True),
    "dualpipev": Schedule("DualPipeV", 2, is_v=True, for_few="zbv"),
}
"""GPipe (Huang et al., 2019), 1F1B (Narayanan et al., 2019), interleaved 1F1B (Narayanan et al., 2021), breadth-first
(Lamy-Poirier, 2023), zero bubble (Qi et al., 2024), DualPipeV (DeepSeek-AI, 2025)."""


def stages_of(rank: int, pp_size: int, virtual_stages: int, is_v: bool) -> list[int]:
    """The stages on ``rank``, in order."""
    if is_v:
        return [rank, 2 * pp_size - 1 - rank]
    return [rank + turn * pp_size for turn in range(virtual_stages)]
