"""Tensor parallelism: single layers split over the ranks of ``tp``.

- ``plan``: which module is split in which way, and who says so.
- ``provenance``: what is seen of a step on fake tensors; ``infer``: a plan from it.
- ``planner``: a plan, whoever gave it, ``confirm``: tried on numbers; ``find_sequence``: where tokens can be split.
- ``exchanges``: what ranks tell each other, in a forward and in its backward.
- ``apply``, ``sequence``, ``heads``, ``split_logits``: a plan made true of a model.
- ``unsplit``: what is whole under a plan, and why.
- ``same_batch``: that ranks which split layers are given the same batch.
"""

from lightning_dist.tensor_parallel.apply import TensorParallel
from lightning_dist.tensor_parallel.plan import STYLES, Entry, Plan, PlanError, resolve_plan
from lightning_dist.tensor_parallel.planner import StepTrace, TensorParallelConfig, find_plan, make_plan
from lightning_dist.tensor_parallel.provenance import Provenance
from lightning_dist.tensor_parallel.same_batch import DifferentBatchError, SameBatch
from lightning_dist.tensor_parallel.split_logits import SplitLogits, whole_logits

__all__ = [
    "STYLES",
    "DifferentBatchError",
    "Entry",
    "Plan",
    "PlanError",
    "Provenance",
    "SameBatch",
    "SplitLogits",
    "StepTrace",
    "TensorParallel",
    "TensorParallelConfig",
    "find_plan",
    "make_plan",
    "resolve_plan",
    "whole_logits",
]
