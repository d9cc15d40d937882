"""Compare the outputs and gradients of a split block with those of the whole block on random inputs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist._compat import simulated_backend
from lightning_dist.techniques.tensor_parallel.apply import TensorParallel
from lightning_dist.techniques.tensor_parallel.plan import Plan
from lightning_dist.tracing.block_trial import BlockTrial
from lightning_dist.tracing.step_graph.dataflow import Call

__all__ = ["BLOCK", "Trial"]

BLOCK = "block"
"""The name of the block in the plan of a trial."""


class Trial(BlockTrial):
    """Compare splits of a block with the whole block (see :class:`~lightning_dist.tracing.block_trial.BlockTrial`).

    Args:
        block: The block, on any device (also the meta device).
        call: A recorded call of the block on fake tensors.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
        used: Indices of the returned tensors that the model uses; empty: all.
    """

    def __init__(
        self, block: nn.Module, call: Call, mesh: DeviceMesh, num_shards: int, used: Collection[int] = ()
    ) -> None:
        self._mesh = mesh
        self._num_shards = num_shards
        super().__init__(block, call, torch.device(mesh.device_type), used)

    def difference(self, plan: Plan) -> str:
        """Split a copy of the block as ``plan`` says, and compare it with the whole block. This is a collective.

        Args:
            plan: A plan in which the block's name is :data:`BLOCK`.

        Returns:
            A description of the difference, or the error that the split block raises; empty: the results are the same.

        Raises:
            PlanError: If the block cannot be split as the plan says.
        """
        holder = nn.ModuleDict({BLOCK: self.copy_of_block()})
        if untouched := self._untouched(plan):
            return f"the trial shows nothing about {untouched}, whose weight gets no gradient in it"
        plan = replace(plan, draws_random=False, split_logits=())
        parallel = TensorParallel(holder, plan, self._mesh, self._num_shards)
        parallel.split(list(holder.parameters()), list(holder.modules()))
        params = dict(holder[BLOCK].named_parameters())
        running = [holder[BLOCK]]
        holder[BLOCK].register_forward_pre_hook(lambda *_: parallel.use_local(holder.modules(), running))
        # Code that runs again in a backward, as with a checkpoint inside of the block, may do so in training only.
        return self.compare(holder[BLOCK], params, also_in_training=bool(plan.widths))

    def _untouched(self, plan: Plan) -> str:
        """Return the name of an inferred layer whose weight has no gradient in the whole block; empty: there is none.

        The trial does not test such a layer, which occurs, for example, where a mask hides the layer's output.
        """
        if simulated_backend() is not None:  # Gradients have no values.
            return ""
        largest = max((float(tensor.norm()) for tensor in self.expected.values()), default=0.0)
        inferred = [name for name, entry in plan.entries.items() if entry.source == "inferred" and entry.is_split]
        for name in (name.partition(".")[2] for name in inferred):
            gradient = self.expected.get(f"{name}.weight")
            if gradient is not None and float(gradient.norm()) <= 1e-12 * largest:
                return name
        return ""
