"""Find out what a way of training needs before it runs, in one process.

- ``environment``: Tells a Trainer that it is one rank of many.
- ``forked``: Calls functions in forked processes.
- ``dry_run``: Runs the first steps of a training on tensors without values, and measures their memory.
- ``layouts``: Lists the ways to spread a training over ranks.
- ``plan``: Predicts the memory of many layouts.
"""

from lightning_dist.plugins.planning.dry_run import DryRun, dry_run
from lightning_dist.plugins.planning.layouts import Layout, layouts_of
from lightning_dist.plugins.planning.plan import Planned, plan

__all__ = ["DryRun", "Layout", "Planned", "dry_run", "layouts_of", "plan"]
