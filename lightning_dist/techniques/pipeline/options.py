"""Define the options of pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.options import Build, TechniqueOptions, argument
from lightning_dist.techniques.pipeline.pipeline import Pipeline
from lightning_dist.techniques.pipeline.schedules import SCHEDULES
from lightning_dist.techniques.pipeline.stages import PipelineConfig
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = ["PipelineOptions"]

_MICROBATCHES_PER_STAGE = 4
"""The largest number of microbatches for each stage that is chosen if the user asks for none."""


@dataclass(frozen=True)
class PipelineOptions(TechniqueOptions):
    """Choose how a model is cut into stages, and how they run.

    Args:
        num_microbatches: Number of microbatches that a rank's part of the batch is split into. None: the greatest
            number up to 4 per stage that divides the samples, and leaves BatchNorm at least two samples.
        schedule: Name of the pipeline's schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``,
            ``interleaved_zero_bubble``, ``zbv`` or ``dualpipev``.
        virtual_stages: Number of stages on a process. None: 1, or 2 for a schedule that needs several.
        split: Names of the modules that each stage but the first begins with, such as ``[layers.4, layers.9]``. None:
            stages are balanced by cost.

    Raises:
        ValueError: If ``schedule`` is unknown, ``num_microbatches`` is less than 1, or ``virtual_stages`` does not fit
            the schedule.
    """

    num_microbatches: int | None = argument(None, only_with="pp")
    schedule: str = argument("1f1b", only_with="pp")
    virtual_stages: int | None = argument(None, only_with="pp")
    split: Sequence[str] | None = argument(None, only_with="pp")

    def __post_init__(self) -> None:
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise ValueError(f"num_microbatches={self.num_microbatches} must be at least 1.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}.")
        known = SCHEDULES[self.schedule]
        if self.virtual_stages is not None and (
            self.virtual_stages < known.virtual_stages
            or (self.virtual_stages > known.virtual_stages and not known.allows_more_stages)
        ):
            at_least = "at least " if known.allows_more_stages else ""
            raise ValueError(
                f"virtual_stages={self.virtual_stages} does not go with schedule={self.schedule!r}, which needs"
                f" {at_least}{known.virtual_stages} on each rank."
            )

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether there are stages."""
        return layout.pp > 1

    def without_effect(self, layout: ParallelLayout) -> str:
        """Return a sentence about the arguments for stages if there are none."""
        if layout.pp > 1 or not self.given().keys() - {"schedule"}:
            return ""
        return (
            "pp_size is 1, so there are no stages: num_microbatches, virtual_stages, split and schedule have no effect."
            " Use accumulate_grad_batches for smaller batches."
        )

    def compared(self) -> Mapping[str, Any]:
        """Return the arguments with names of modules as a tuple."""
        return {**super().compared(), "split": None if self.split is None else tuple(self.split)}

    def chosen(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the numbers of microbatches and of stages on a rank."""
        pipeline = parallel.get(Pipeline)
        if pipeline is None:
            return {}
        config = pipeline.config
        return {"num_microbatches": config.num_microbatches, "virtual_stages": config.stages_per_rank}

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the schedule, and the numbers of microbatches and stages that were chosen."""
        pipeline = parallel.get(Pipeline)
        config = None if pipeline is None else pipeline.config
        return {
            "schedule": None if config is None else config.schedule,
            "microbatches": None if config is None else config.num_microbatches,
            "stages_per_rank": None if config is None else config.stages_per_rank,
        }

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Cut the module into stages by tracing its step on a microbatch.

        Raises:
            ValueError: If the number of microbatches does not fit the schedule.
        """
        layout, stage_to_stage = build.layout, build.groups.stage_to_stage
        if layout.pp == 1 or stage_to_stage is None or not any(True for _ in build.module.parameters()):
            return
        known = SCHEDULES[self.schedule]
        num_stages = layout.pp * (self.virtual_stages or known.virtual_stages)
        first = build.steps.on_microbatch(self.num_microbatches, _MICROBATCHES_PER_STAGE * num_stages)
        ignored = {"num_microbatches", "schedule"} & self.given().keys()
        if first.in_turn and ignored and dist.get_rank() == 0:
            warnings.warn(
                f"{type(build.module).__name__} uses manual optimization, for which the stages of a pipeline work in"
                " turn on a rank's whole batch: num_microbatches and schedule have no effect.",
                stacklevel=2,
            )
        if (
            first.step is not None
            and not first.in_turn
            and not known.fits(first.num_microbatches, layout.pp, num_stages)
        ):
            raise ValueError(
                f"num_microbatches={first.num_microbatches} is too few for schedule={self.schedule!r} with"
                f" {num_stages} stages, or no multiple of what it takes at a time: use a multiple of {num_stages}, with"
                f" a batch size that it divides, or schedule={known.fallback!r}."
            )
        yield Pipeline(
            build.module,
            PipelineConfig(layout.pp, self.schedule, self.virtual_stages, self.split, first),
            build.units,
            layout.get_mesh(build.mesh, "pp").get_group(),
            stage_to_stage,
            build.parameter_mesh,
            layout.data_parallel_rank(dist.get_rank()),
            splits_backward=layout.tp == layout.ep == 1 and not build.arguments.recomputes,
        )
