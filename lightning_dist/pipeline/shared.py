"""Parameters that several stages use, such as an embedding that is tied to the head: each has it, with one gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.pipeline.graph import StepGraph
from lightning_dist.pipeline.stages import PipelineConfig, Stages

__all__ = ["SharedParameters"]


class SharedParameters:
    """Those that this rank shares with others of its pipeline.

    Args:
        root: The user's module.
        stages: How it is cut.
        config: Where the stages are.
        group: The ranks of the pipeline, for sends and receives.
    """

    def __init__(self, root: nn.Module, stages: Stages, config: PipelineConfig, group: dist.ProcessGroup) -> None:
        self._root = root
        self._group = group
        self._rank = dist.get_rank(group)
        self._holders = {
            name: ranks
            for name, needed in stages.stages_of_param.items()
            if len(ranks := sorted({config.rank_of(stage) for stage in needed})) > 1 and self._rank in ranks
        }
        self._used: set[str] = set()

    def will_run(self, graph: StepGraph) -> None:
        """Note which parameters get gradients in a step: the others of an optimizer's stay without one."""
        self._used |= {name for name in self._holders.keys() - self._used if graph.uses_param(name)}

    def sum_gradients(self) -> None:
        """Let each have the sum of all stages' gradients, bit for bit the same. A collective over their ranks."""
        if not self._holders:
            return
        params = {name: param for name, param in self._root.named_parameters() if param.requires_grad}
        operations, received = [], {}
        used, self._used = self._used, set()
        for name, ranks in self._holders.items():
            if name not in params or name not in used:
                continue
            own = _local_gradient(params[name])
            received[name] = {rank: torch.empty_like(own) if rank != self._rank else own for rank in ranks}
            for rank, tensor in received[name].items():
                if rank != self._rank:
                    operations.append(dist.P2POp(dist.isend, own, group=self._group, group_peer=rank))
                    operations.append(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for name, by_rank in received.items():
            first, *others = (by_rank[rank] for rank in self._holders[name])  # in one order on all
            total = first.clone()
            for other in others:
                total += other
            _local_gradient(params[name]).copy_(total)


def _local_gradient(param: Tensor) -> Tensor:
    """This rank's part of the gradient; zeros where there was none."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
