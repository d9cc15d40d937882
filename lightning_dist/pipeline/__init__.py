"""Pipeline parallelism: a model cut into stages, its step left as it is.

In the order in which they build on each other: ``graph`` (what graphs between a model's parts in a step), ``draws`` and
``of_batch`` (what in it draws random numbers, and what the batch goes into), ``checkpointing`` (of the user's own),
``ways``, ``path`` and ``follow`` (how it is found, and when anew), ``balance`` (which parts are which stage),
``schedules``, ``stages`` (where each parameter is), ``replay`` (a step on one stage), ``microbatches``,
``simulation`` and ``timeline`` (when what runs), ``shared`` (parameters of several stages), ``failures`` (errors that
all ranks raise), ``attributes`` (what a step leaves), ``original_module`` and ``whole_model`` (the module as it was,
and whole), ``outside_of_steps`` (hooks that see all stages), ``whole_state`` (a checkpoint of all stages), ``runner``
(a step on all of them).
"""

from lightning_dist.pipeline.failures import Failure, agreed_path, raise_together
from lightning_dist.pipeline.follow import note_exchange, trace_step
from lightning_dist.pipeline.graph import Leaf, StepGraph, TraceError
from lightning_dist.pipeline.microbatches import (
    batch_size_of,
    check_divides,
    map_leaves,
    num_microbatches_for,
    signature,
    split_batch,
)
from lightning_dist.pipeline.of_batch import BuffersOfStep
from lightning_dist.pipeline.original_module import OriginalModule
from lightning_dist.pipeline.outside_of_steps import AllStages
from lightning_dist.pipeline.runner import Pipeline, PreparedStep, Ran, RunRoot
from lightning_dist.pipeline.schedules import SCHEDULES
from lightning_dist.pipeline.simulation import simulate
from lightning_dist.pipeline.stages import PipelineConfig, Stages, drop_remote, find_stages, own_units
from lightning_dist.pipeline.stand_in import refuse_stand_ins
from lightning_dist.pipeline.timeline import Timeline

__all__ = [
    "SCHEDULES",
    "AllStages",
    "BuffersOfStep",
    "Failure",
    "Leaf",
    "OriginalModule",
    "Pipeline",
    "PipelineConfig",
    "PreparedStep",
    "Ran",
    "RunRoot",
    "Stages",
    "StepGraph",
    "Timeline",
    "TraceError",
    "agreed_path",
    "batch_size_of",
    "check_divides",
    "drop_remote",
    "find_stages",
    "map_leaves",
    "note_exchange",
    "num_microbatches_for",
    "own_units",
    "raise_together",
    "refuse_stand_ins",
    "signature",
    "simulate",
    "split_batch",
    "trace_step",
]
