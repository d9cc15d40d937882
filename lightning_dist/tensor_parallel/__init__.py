"""Tensor parallelism: single layers split over the ranks of ``tp``.

- ``plan``: which module is split in which way, and who says so.
- ``exchanges``: what ranks tell each other, in a forward and in its backward.
- ``apply``: a plan made true of a model.
- ``same_batch``: that ranks which split layers are given the same batch.
"""

from lightning_dist.tensor_parallel.apply import TensorParallel
from lightning_dist.tensor_parallel.plan import STYLES, Entry, PlanError, resolve_plan
from lightning_dist.tensor_parallel.same_batch import DifferentBatchError, SameBatch

__all__ = ["STYLES", "DifferentBatchError", "Entry", "PlanError", "SameBatch", "TensorParallel", "resolve_plan"]
