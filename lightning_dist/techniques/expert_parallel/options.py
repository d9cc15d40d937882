"""Define the options of expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.expert_parallel.planner import ExpertPlan, find_expert_plan
from lightning_dist.techniques.options import Build, TechniqueOptions, argument

__all__ = ["ExpertOptions"]


@dataclass(frozen=True)
class ExpertOptions(TechniqueOptions):
    """Choose how experts are distributed.

    Args:
        expert_capacity: Largest number of tokens that a process sends to one expert in a forward of a training step.
            The others are left out for this expert, so that all sizes are known beforehand, and no host waits for
            numbers of tokens. None: all tokens are sent.

    Raises:
        ValueError: If the capacity is no number of tokens.
    """

    expert_capacity: int | None = argument(None, only_with="ep")

    def __post_init__(self) -> None:
        capacity = self.expert_capacity
        if capacity is not None and (type(capacity) is not int or capacity < 1):
            raise ValueError(
                f"expert_capacity={capacity!r} must be a number of tokens, 1 or more, or None for no limit."
            )

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether experts may be distributed."""
        return max(layout.ep, layout.tp) > 1

    def without_effect(self, layout: ParallelLayout) -> str:
        """Return a sentence about the capacity if no experts are distributed."""
        if self.expert_capacity is None or max(layout.ep, layout.tp) > 1:
            return ""
        return (
            f"expert_capacity={self.expert_capacity} has no effect: ep_size and tp_size are 1, so that no experts are"
            " distributed."
        )

    def plan(self, build: Build, styles: dict[str, str]) -> ExpertPlan:
        """Return the plan by which experts are distributed over ``ep`` and ``tp``.

        Args:
            build: The module, its layout and the other objects from which techniques are built.
            styles: The style that the user's plan gives a module, by full name.

        Raises:
            ValueError: If experts cannot be distributed, or a capacity is given for experts that compute all tokens.
        """
        layout, is_strict = build.layout, build.arguments["strict_plan"]
        plan = find_expert_plan(build.module, layout.ep, layout.tp, build.device, styles, is_strict)
        dense = [name for name, form in plan.forms.items() if form == "dense"]
        if self.expert_capacity is not None and dense:
            raise ValueError(
                f"expert_capacity={self.expert_capacity}: each expert of {dense[0]}"
                f" ({type(build.module.get_submodule(dense[0])).__name__}) computes all tokens, so that none is left"
                " out. Use expert_capacity=None."
            )
        return plan
