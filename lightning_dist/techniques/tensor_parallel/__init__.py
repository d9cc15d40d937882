"""Run tensor parallelism: split single layers over the ranks of ``tp``.

``options`` defines the arguments. These modules find a plan:

- ``plan``: Represents a plan (which module is split in which style), and reads those of the user and Hugging Face.
- ``layers``: Finds out which embeddings and attention heads can be split.
- ``infer``: Infers a plan from the data flow between layers, which a step on fake tensors has recorded.
- ``attention_heads``: Finds modules of ``nn.MultiheadAttention``, and computes with some of their heads.
- ``gathered``: Finds layers to split with a gathered output where too little is split otherwise.
- ``ties``: Splits modules that share parameters alike or not at all.
- ``find_sequence``: Finds where hidden states can be split along the sequence (sequence parallelism).
- ``hooked``: Finds the layers whose features a hook sees.
- ``trial``: Compares the outputs and gradients of a split block with those of the whole block on random inputs.
- ``sizes``: Finds the sizes in a unit's code that have to be those of a rank's part.
- ``unit_trials``: Tries each unit as planned, and replicates the layers whose split changes its results.
- ``planner``: Combines these into the plan of a model.

These modules apply it:

- ``apply``: Splits a model as its plan says, and decides which form of a parameter its modules hold when.
- ``split_modules``: Adds what each style needs to the modules of a plan.
- ``placements``: Decides which part of each parameter a rank has.
- ``split_layers``, ``sequence``, ``heads``, ``split_logits``: Exchange hidden states, tokens, heads and logits.
- ``own_width``: Lets modules read the width of their input as that of a rank's part.
- ``async_matmul``: Exchanges tokens while layers multiply.
- ``table``, ``unsplit``: Describe the plan in the start-up table (what is split, what is replicated, and why).
"""

from lightning_dist.techniques.tensor_parallel.apply import TensorParallel
from lightning_dist.techniques.tensor_parallel.options import TensorParallelOptions
from lightning_dist.techniques.tensor_parallel.plan import STYLES, Entry, Plan, PlanError, resolve_plan
from lightning_dist.techniques.tensor_parallel.planner import StepTrace, find_plan, make_plan
from lightning_dist.techniques.tensor_parallel.split_logits import SplitLogits

__all__ = [
    "STYLES",
    "Entry",
    "Plan",
    "PlanError",
    "SplitLogits",
    "StepTrace",
    "TensorParallel",
    "TensorParallelOptions",
    "find_plan",
    "make_plan",
    "resolve_plan",
]
