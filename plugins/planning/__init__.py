"""Find out what a way of training needs before it runs, in one process.

- ``environment``: Tells a Trainer that it is one rank of many.
- ``forked``: Calls functions in forked processes.
- ``dry_run``: Runs the first steps of a training on tensors without values, and measures their memory.
- ``layouts``: Lists the ways to spread a training over ranks.
- ``operation_times``: Measures operations on the device of this machine.
- ``figures``: Knows the speed of devices and links.
- ``where``: Chooses these figures from what is given.
- ``step_time``: Predicts the time of a step.
- ``memory_of``: Reads sizes of memory.
- ``auto_parallel``: Provides the strategy that chooses its layout by a plan.
- ``planned``: Holds what is predicted for a layout.
- ``choices``: Lists options besides the sizes that may help a layout.
- ``estimates``: Estimates it from the dry runs of other layouts.
- ``picture``: Draws a plan.
- ``report``: Compares the prediction with what the run needs.
- ``plan``: Predicts the memory and the time of many layouts.
"""

from lightning_dist.plugins.planning.dry_run import DryRun, dry_run
from lightning_dist.plugins.planning.layouts import Layout, layouts_of
from lightning_dist.plugins.planning.plan import plan
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.step_time import StepTime, Where, predict_step_time
from lightning_dist.plugins.planning.where import find_where

__all__ = [
    "DryRun",
    "Layout",
    "Planned",
    "StepTime",
    "Where",
    "dry_run",
    "find_where",
    "layouts_of",
    "plan",
    "predict_step_time",
]
