"""Run pipeline parallelism: cut a model into stages, and run the user's unchanged step on them.

``options`` defines the arguments. The modules, in the order in which they build on each other:

- ``buffers``: Restores buffers that each microbatch would change, but one process changes once per step.
- ``balance``, ``schedules``, ``stages``: Assign parts and parameters to stages, and stages to ranks.
- ``stand_in``: Provides stand-ins for tensors that are on other stages.
- ``holders``, ``remote_value``: Record which ranks have the values of a tensor, and stand for it on the others.
- ``replay``: Runs a step on one stage.
- ``microbatches``: Splits a batch into microbatches.
- ``simulation``: Simulates when each forward and backward runs.
- ``shared``: Sums the gradients of parameters that several stages use.
- ``failures``: Raises an error of one rank on all ranks.
- ``attributes``: Saves and restores attributes of modules that a step changes.
- ``whole_model``: Gives every rank the parameters of all stages temporarily.
- ``outside_of_steps``: Lets hooks and callbacks work on the parameters of all stages.
- ``in_turn``: Runs steps with backwards of their own, in which the stages work in turn.
- ``whole_state``: Makes each rank's state dicts describe the tensors of all stages, for checkpoints.
- ``schedule_runner``: Runs a step on this rank's stages, in the order of a schedule.
- ``pipeline``: Implements the technique.
"""

from lightning_dist.techniques.pipeline.buffers import BuffersOfStep
from lightning_dist.techniques.pipeline.failures import Attempt, Failure, PathAgreement, raise_first, raise_together
from lightning_dist.techniques.pipeline.in_turn import StagesInTurn, refuse_gradients_of_parts
from lightning_dist.techniques.pipeline.microbatches import (
    SPLIT_BY_HAND,
    batch_size_of,
    check_divides,
    greatest_divisor,
    map_leaves,
    signature,
    split_batch,
)
from lightning_dist.techniques.pipeline.options import PipelineOptions
from lightning_dist.techniques.pipeline.outside_of_steps import AllStages
from lightning_dist.techniques.pipeline.pipeline import Pipeline
from lightning_dist.techniques.pipeline.schedule_runner import PreparedStep, RunRoot, ScheduleRunner, StepOutcome
from lightning_dist.techniques.pipeline.schedules import SCHEDULES
from lightning_dist.techniques.pipeline.simulation import simulate
from lightning_dist.techniques.pipeline.stages import PipelineConfig, Stages, drop_remote, find_stages, own_units
from lightning_dist.techniques.pipeline.stand_in import refuse_stand_ins

__all__ = [
    "SCHEDULES",
    "SPLIT_BY_HAND",
    "AllStages",
    "Attempt",
    "BuffersOfStep",
    "Failure",
    "PathAgreement",
    "Pipeline",
    "PipelineConfig",
    "PipelineOptions",
    "PreparedStep",
    "RunRoot",
    "ScheduleRunner",
    "Stages",
    "StagesInTurn",
    "StepOutcome",
    "batch_size_of",
    "check_divides",
    "drop_remote",
    "find_stages",
    "greatest_divisor",
    "map_leaves",
    "own_units",
    "raise_first",
    "raise_together",
    "refuse_gradients_of_parts",
    "refuse_stand_ins",
    "signature",
    "simulate",
    "split_batch",
]
