"""Run expert parallelism: each rank of ``ep`` and ``tp`` has a part of the experts of a mixture.

The ranks of ``ep`` have different parts of the batch. The forward of a module that holds stacked experts sends each
token to the ranks that have its experts, lets the module itself compute there, and adds up the weighted results on the
rank of the token. The ranks of ``tp`` have the same tokens, and add up their experts' results. Everything else of the
model, routers included, runs as written.

- ``options``: Defines the argument.
- ``planner``: Finds the modules that hold stacked experts, and tries whether a part of the experts can compute alone.
- ``dispatch``: Sends tokens to the ranks of their experts, and their results back.
- ``capacity``: Does the same with a limit on the tokens of an expert, so that no size depends on values.
- ``same_tokens``: Computes the experts of this rank where all ranks have the same tokens.
- ``expert_parallel``: Defines the technique.
"""

from lightning_dist.techniques.expert_parallel.expert_parallel import ExpertParallel
from lightning_dist.techniques.expert_parallel.options import ExpertOptions
from lightning_dist.techniques.expert_parallel.planner import ExpertPlan, find_expert_plan

__all__ = ["ExpertOptions", "ExpertParallel", "ExpertPlan", "find_expert_plan"]
