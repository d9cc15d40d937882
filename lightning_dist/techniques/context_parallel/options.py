"""Define the options of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.context_parallel.context_parallel import ContextParallel
from lightning_dist.techniques.context_parallel.plan import ATTENTIONS
from lightning_dist.techniques.context_parallel.planner import find_context_plan
from lightning_dist.techniques.options import Build, TechniqueOptions, argument
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = ["ContextParallelOptions"]


@dataclass(frozen=True)
class ContextParallelOptions(TechniqueOptions):
    """Choose how sequences are split over ``cp``.

    Args:
        attention: How attention sees the tokens of other ranks of ``cp``. ``"ulysses"``: ranks exchange heads for
            tokens; ``cp_size`` must divide the number of heads. ``"all_gather"``: each rank gathers all keys and
            values. ``"auto"``: ``"ulysses"`` if ``cp_size`` divides the number of heads.
        split_evaluations: Whether blocks run on parts of the sequence in validation, test and predict steps as well.

    Raises:
        ValueError: If ``attention`` is not one of the known ones.
    """

    attention: str = argument("auto", only_with="cp")
    split_evaluations: bool = argument(False, only_with="cp")

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention={self.attention!r} must be one of {', '.join(map(repr, ATTENTIONS))}.")

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether sequences are split."""
        return layout.cp > 1

    def without_effect(self, layout: ParallelLayout) -> str:
        """Return a sentence about ``attention`` if no sequence is split."""
        if layout.cp > 1 or self.attention == "auto":
            return ""
        return f"attention={self.attention!r} has no effect: cp_size is 1, so that no sequence is split."

    def chosen(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the kind of attention."""
        split = parallel.get(ContextParallel)
        return {} if split is None else {"attention": split.plan.attention}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Find where sequences can be split, or take over the plan of the module that this one is a copy of."""
        group = build.groups.context
        if group is None:
            return
        original = None if build.copied is None else build.copied.get(ContextParallel)
        keeps_split = build.layout.tp == build.layout.pp == 1  # tp splits logits, and pp passes on outputs.
        plan = (
            find_context_plan(
                build.module, build.units, self.attention, build.steps.whole(), group, build.device, keeps_split
            )
            if original is None
            else original.plan
        )
        yield ContextParallel(plan, group, build.mesh.device_type, self.split_evaluations)
