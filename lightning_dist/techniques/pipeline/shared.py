"""Sum the gradients of parameters that several stages use, such as an embedding that is tied to the head.

Each of these stages has a copy of the parameter, and all copies must get the same gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.mesh.collectives import group_on_host
from lightning_dist.techniques.pipeline.stages import PipelineConfig, Stages
from lightning_dist.tracing.step_graph import StepGraph

__all__ = ["SharedParameters"]


class SharedParameters:
    """Keep this rank's copies of shared parameters equal to the copies on other ranks of its pipeline.

    Args:
        root: The user's module with the parameters of this rank's stages.
        stages: Assignment of the module's parts and parameters to stages.
        config: The configuration of the pipeline, which says which rank has each stage.
        group: Process group of the pipeline's ranks, for sends and receives.
    """

    def __init__(self, root: nn.Module, stages: Stages, config: PipelineConfig, group: dist.ProcessGroup) -> None:
        self._root = root
        self._group = group
        self._rank = dist.get_rank(group)
        holders = {
            name: sorted({config.rank_of(stage) for stage in needed}) for name, needed in stages.stages_of_param.items()
        }
        self._names = sorted(name for name, ranks in holders.items() if len(ranks) > 1)
        self._holders = {name: ranks for name, ranks in holders.items() if len(ranks) > 1 and self._rank in ranks}
        self._on_host = group_on_host(group, "shared parameters") if config.in_turn and self._names else None
        self._used: set[str] = set()

    def record_used_parameters(self, graph: StepGraph) -> None:
        """Record which shared parameters a step uses; those that it does not use must keep ``grad=None``.

        Args:
            graph: Graph of a step whose backwards are about to run.
        """
        self._used |= {name for name in self._holders.keys() - self._used if graph.uses_param(name)}

    def sum_gradients(self) -> None:
        """Sum the gradients of each shared parameter over its stages, with bitwise equal sums on all of them.

        This is a collective over the ranks that share parameters.
        """
        if not self._holders:
            return
        used, self._used = self._used, set()
        self._sum(used)

    @contextmanager
    def summing_gradients(self) -> Iterator[None]:
        """Run one of the several backwards of a step in this context, and then sum the gradients over the stages.

        This is a collective over the pipeline. The gradients of earlier backwards are the same on all stages; each
        stage begins with an equal part of them, so that they are counted once.
        """
        if not self._names:
            yield
            return
        params = self._trained()
        for name, ranks in self._holders.items():
            if name in params and (gradient := params[name].grad) is not None:
                gradient.div_(len(ranks))
        yield
        has = torch.tensor([name in params and params[name].grad is not None for name in self._names]).int()
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._on_host)
        self._sum({name for name, found in zip(self._names, has.tolist(), strict=True) if found})

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self._root.named_parameters() if param.requires_grad}

    def _sum(self, names: Collection[str]) -> None:
        """Sum the gradients of the shared parameters ``names``; this is a collective over the ranks that share them."""
        params = self._trained()
        operations, received = [], {}
        for name, ranks in self._holders.items():
            if name not in params or name not in names:
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
            # All ranks add in the same order, so that the sums are bitwise equal.
            first, *others = (by_rank[rank] for rank in self._holders[name])
            total = first.clone()
            for other in others:
                total += other
            _local_gradient(params[name]).copy_(total)


def _local_gradient(param: Tensor) -> Tensor:
    """Return this rank's shard of the gradient, after setting the gradient to zeros if there is none."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
