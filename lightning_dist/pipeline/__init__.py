"""Pipeline parallelism: a model is cut into stages, and the user's step runs on them unchanged.

The modules, in the order in which they build on each other:

- ``buffers``: buffers that a step changes;
- ``balance``, ``schedules``, ``stages``: which parts and parameters are on which stage, and which rank has the stage;
- ``replay``: how a step runs on one stage;
- ``microbatches``: how a batch is split;
- ``simulation``, ``timeline``: when each forward and backward runs;
- ``shared``: parameters that several stages use;
- ``failures``: errors of one rank that all ranks raise;
- ``attributes``: what a step leaves in the module's attributes;
- ``original_module``, ``whole_model``: the module before it was spread, and the module with all stages' parameters;
- ``outside_of_steps``: hooks that work on the parameters of all stages;
- ``whole_state``: a checkpoint of all stages;
- ``schedule_runner``: how a step runs on all stages;
- ``pipeline``: the technique.
"""

from lightning_dist.pipeline.buffers import BuffersOfStep
from lightning_dist.pipeline.failures import Attempt, Failure, agreed_path, raise_together
from lightning_dist.pipeline.microbatches import (
    batch_size_of,
    check_divides,
    map_leaves,
    num_microbatches_for,
    signature,
    split_batch,
)
from lightning_dist.pipeline.original_module import OriginalModule
from lightning_dist.pipeline.outside_of_steps import AllStages
from lightning_dist.pipeline.pipeline import Pipeline
from lightning_dist.pipeline.schedule_runner import PreparedStep, Ran, RunRoot, ScheduleRunner
from lightning_dist.pipeline.schedules import SCHEDULES
from lightning_dist.pipeline.simulation import simulate
from lightning_dist.pipeline.stages import PipelineConfig, Stages, drop_remote, find_stages, own_units
from lightning_dist.pipeline.stand_in import refuse_stand_ins
from lightning_dist.pipeline.timeline import Timeline

__all__ = [
    "SCHEDULES",
    "AllStages",
    "Attempt",
    "BuffersOfStep",
    "Failure",
    "OriginalModule",
    "Pipeline",
    "PipelineConfig",
    "PreparedStep",
    "Ran",
    "RunRoot",
    "ScheduleRunner",
    "Stages",
    "Timeline",
    "agreed_path",
    "batch_size_of",
    "check_divides",
    "drop_remote",
    "find_stages",
    "map_leaves",
    "num_microbatches_for",
    "own_units",
    "raise_together",
    "refuse_stand_ins",
    "signature",
    "simulate",
    "split_batch",
]
