"""Run context parallelism: split the sequence of a batch over ranks, which share the batch.

The blocks of a model run on each rank's part of the sequence, and everything outside of them runs as written, on whole
sequences. Inside of blocks, only attention by ``F.scaled_dot_product_attention`` sees other tokens.

- ``options``: Defines the arguments.
- ``plan``: Represents how the arguments of blocks are split.
- ``tokens``: Distributes the tokens over ranks, and exchanges them.
- ``attention``: Replaces attention while a block runs on its part of the sequence.
- ``split_arguments``: Splits the arguments of a block.
- ``inside_block``: Replaces functions in a block whose results depend on which tokens they are given.
- ``split_blocks``: Runs chains of blocks on parts of the sequence, by hooks.
- ``split_evaluation``: Does so in evaluations, if the user asks for it.
- ``after_blocks``, ``split_tokens``: Run norms, heads and the loss on this rank's tokens.
- ``trial``: Compares a block on parts of the sequence with the original block.
- ``planner``: Finds the plan from a step on fake tensors, and tries it.
- ``context_parallel``: Defines the technique.
"""

from lightning_dist.techniques.context_parallel.context_parallel import ContextParallel
from lightning_dist.techniques.context_parallel.options import ContextParallelOptions
from lightning_dist.techniques.context_parallel.plan import ATTENTIONS, ContextPlan, SequenceSplitError
from lightning_dist.techniques.context_parallel.planner import find_context_plan

__all__ = [
    "ATTENTIONS",
    "ContextParallel",
    "ContextParallelOptions",
    "ContextPlan",
    "SequenceSplitError",
    "find_context_plan",
]
