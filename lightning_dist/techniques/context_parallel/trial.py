"""Compare a block that runs on parts of the sequence with the original block on random inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.mesh.autograd_collectives import summed
from lightning_dist.model.around_forward import enter_around_forward
from lightning_dist.techniques.context_parallel.plan import AttentionKind, ContextPlan, SplitBlock
from lightning_dist.techniques.context_parallel.split_blocks import SplitBlocks
from lightning_dist.tracing.block_trial import BlockTrial
from lightning_dist.tracing.step_graph.dataflow import Call

__all__ = ["Trial"]

_BLOCK = "block"


class Trial(BlockTrial):
    """Compare ways to split the arguments of a block with the original block.

    Args:
        block: The block, on any device (also the meta device).
        call: A recorded call of the block on fake tensors.
        group: Process group of the ranks of ``cp``.
        device: Device to compute on.
    """

    def __init__(self, block: nn.Module, call: Call, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.num_positions = 0
        """How often code inside of the block has asked for the positions of tokens in the last trial."""
        self.kinds: tuple[AttentionKind, ...] = ()
        """The kinds of the attentions in the last trial."""
        super().__init__(block, call, device, used=(0,), keeps_hooks=False)  # In training, hooks are refused.

    def difference(self, split: SplitBlock, attention: str) -> str:
        """Run a copy of the block on parts of the sequence, and compare it. This is a collective over all processes.

        Args:
            split: How the block's arguments are split.
            attention: ``"ulysses"`` or ``"all_gather"``.

        Returns:
            A description of the difference, or the error that the block raises; empty: the results are the same.
        """
        block = self.copy_of_block()
        plan = ContextPlan(((_BLOCK,),), {_BLOCK: split}, attention, (False,))
        split_blocks = SplitBlocks({_BLOCK: block}, plan, self._group, random=None)
        enter_around_forward(block, lambda: split_blocks.around_forward(block))
        error = self.compare(block, dict(block.named_parameters()))
        inside = split_blocks.inside
        self.num_positions = 0 if inside is None else inside.num_positions
        self.kinds = () if inside is None else tuple(inside.attend.kinds)
        return error

    def whole_gradient(self, gradient: Tensor) -> Tensor:
        """Return the average over ``cp``, as the sharding of parameters computes it."""
        return summed(gradient, self._group, 0) / self._group.size()
