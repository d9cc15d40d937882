"""Let optimizers step on whole parameters, each on a rank that owns it, if they compute something else on shards.

- ``trial``: Tries an optimizer on small tensors, to find out what an update depends on.
- ``owners``: Decides which rank owns a parameter, and exchanges parts of parameters with the owners.
- ``step``: Replaces the step of an optimizer.
"""

from lightning_dist.parameters.whole_step.step import WholeStep
from lightning_dist.parameters.whole_step.trial import Finding, Scope, probe, try_optimizer

__all__ = ["Finding", "Scope", "WholeStep", "probe", "try_optimizer"]
