"""Define the protocol of techniques, which change how a module is built and run.

A technique (sharding, tensor parallelism, pipeline stages, activation checkpointing, ...) is one object in the list
that :func:`lightning_dist.parallelize.parallelize` builds. :class:`~lightning_dist.parallel_module.ParallelModule`
calls the methods of the techniques below, and knows none of the techniques by name. A new technique needs one file and
one entry in the list of options (:mod:`lightning_dist.techniques.options`).

- ``technique``: Defines :class:`Technique`, whose methods do nothing unless a technique overrides them.
- ``roles``: Defines what only some techniques do: choose how parameters are managed, put tensors in their place, split
  tokens, save states, or let ranks have different parameters. Such a technique derives from these classes.
- ``points``: Looks up the methods that techniques override.

The contract:

- **Order.** The list goes from the outside in, like nested ``with`` statements. Methods that act *before* an event
  (``before_step``, entering a context) are called in the order of the list, and methods that act *after* it
  (``finish_output``, ``after_backward``, leaving a context) in the reverse order. Units are prepared from the inside
  out (:meth:`Technique.prepare_unit`), so that an outer technique sees a unit as the inner ones have changed it.
- **Parameter groups.** The parameters of each unit are managed by exactly one group, which is the first one that a
  technique returns from :meth:`Technique.manage_unit`. A step sees the parameters gathered; optimizers, callbacks and
  checkpoints see them as they are after the group has freed them.
- **Gathered parameters.** :meth:`Technique.on_gather` is called when the gathered parameters of a unit are about to be
  used, also if they have been gathered before: after FSDP2's pre-forward hook, which gathers them, and before the
  forward. :meth:`Technique.on_free` is called after the forward, before FSDP2's post-forward hook frees them.
- **Cost.** The methods that a technique overrides are looked up once, when the module is built (see :func:`bound`). A
  method that it does not override is never called.
- **Errors.** A technique that raises an error on one rank must raise one on all ranks, or say in its docstring in which
  collective the other ranks would wait.
"""

from lightning_dist.techniques.protocol.points import (
    INSIDE_OUT,
    Points,
    bound,
    find_gradient_reducer,
    find_shard_memory,
    others_of,
    unchanged_in,
)
from lightning_dist.techniques.protocol.roles import (
    ParameterForms,
    ParameterRules,
    RemoteParts,
    SavedState,
    Scheduled,
    TokenSplits,
)
from lightning_dist.techniques.protocol.technique import Parallel, Rows, SomeTechnique, Technique

__all__ = [
    "INSIDE_OUT",
    "Parallel",
    "ParameterForms",
    "ParameterRules",
    "Points",
    "RemoteParts",
    "Rows",
    "SavedState",
    "Scheduled",
    "SomeTechnique",
    "Technique",
    "TokenSplits",
    "bound",
    "find_gradient_reducer",
    "find_shard_memory",
    "others_of",
    "unchanged_in",
]
