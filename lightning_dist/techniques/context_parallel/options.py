"""Define the options of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    def without_effect(self, layout: ParallelLayout) -> str:
        """Return a sentence about ``attention`` if no sequence is split."""
        if layout.cp > 1 or self.attention == "auto":
            return ""
        return f"attention={self.attention!r} has no effect: cp_size is 1, so that no sequence is split."

    def check_change(self, existing: Parallel, layout: ParallelLayout) -> None:
        """Refuse other parts of sequences, or other attention."""
        split, module = existing.get(ContextParallel), type(existing.module).__name__
        wanted = (layout.cp, self.attention if layout.cp > 1 else "auto")
        found = (1, "auto") if split is None else (split.num_ranks, split.plan.attention)
        if wanted[0] != found[0] or wanted[1] not in ("auto", found[1]):
            raise ValueError(
                f"This {module} is made parallel by an earlier Trainer with {found} as cp_size and attention, and"
                f" cannot be with {wanted} as well. Make a new one, and load the weights from a checkpoint."
            )
        if split is not None and split.splits_evaluations != self.split_evaluations:
            raise ValueError(
                f"An earlier Trainer has made this {module} parallel with split_evaluations={split.splits_evaluations},"
                f" which cannot be changed to {not split.splits_evaluations}. Make a new one, and load the weights from"
                " a checkpoint."
            )

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Find where sequences can be split, or take over the plan of the module that this one is a copy of."""
        group = build.groups.context
        if group is None:
            return
        original = None if build.copied is None else build.copied.get(ContextParallel)
        keeps_split = build.layout.tp == build.layout.pp == 1  # These split logits, and pass on outputs, themselves.
        plan = (
            find_context_plan(
                build.module, build.units, self.attention, build.steps.whole(), group, build.device, keeps_split
            )
            if original is None
            else original.plan
        )
        yield ContextParallel(plan, group, build.mesh.device_type, self.split_evaluations)
