"""Train the GPT with mixtures without Lightning, with experts on different ranks and all-to-alls in the model.

Tokens travel as in GShard (Lepikhin et al., 2020, https://arxiv.org/abs/2006.16668), without a limit on the tokens of
an expert. Everything else is sharded by FSDP2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

from examples.gpt.model import GPT
from lightning_dist.mesh.collectives import TwoShotReduceScatter
from tests.bench import handwritten
from tests.bench.harness import EndStep
from tests.bench.mixture import Experts, with_mixtures
from tests.bench.workload import Workload

__all__ = ["train"]


class _Exchange(torch.autograd.Function):
    """Send ``sent[i]`` rows to rank ``i``, and receive ``received[i]`` rows from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        result = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        result = gradient.new_empty(sum(sent), gradient.size(1))
        dist.all_to_all_single(result, gradient.contiguous(), sent, received)
        return result, None, None


def _compute(self: Experts, whole: int, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of this rank's tokens, of ``whole`` experts on all ranks."""
    ranks, top_k = dist.get_world_size(), index.size(1)
    with torch.no_grad():
        experts = index.flatten()
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=whole)
        of_others = torch.empty_like(counts)
        dist.all_to_all_single(of_others, counts)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = of_others.view(ranks, -1).sum(1).tolist()
        local = torch.arange(whole // ranks).repeat(ranks).repeat_interleave(of_others)
    arrived: Tensor = _Exchange.apply(tokens[order // top_k], sent, received)  # type: ignore[no-untyped-call]
    output = torch.zeros_like(arrived)
    for expert in range(whole // ranks):
        row = torch.where(local == expert)[0]
        output = output.index_add(0, row, functional.silu(arrived[row] @ self.up[expert]) @ self.down[expert])
    returned: Tensor = _Exchange.apply(output, received, sent)  # type: ignore[no-untyped-call]
    weighted = returned * weights.flatten()[order][:, None]
    return torch.zeros_like(tokens).index_add(0, order // top_k, weighted)


def train(workload: Workload, end_step: EndStep) -> None:
    """Train until ``end_step``, which is called with the loss after every step, returns False."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(workload.seed)
    model = with_mixtures(GPT(**workload.model))
    own: set[nn.Parameter] = set()
    for block in model.blocks:
        experts = block.feed_forward.experts
        for name in ("up", "down"):
            part = nn.Parameter(getattr(experts, name).detach().chunk(size)[rank].clone())
            setattr(experts, name, part)
            own.add(part)
        experts.forward = partial(_compute, experts, experts.num_experts)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=own)
    fully_shard(model, mesh=mesh, ignored_params=own)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(TwoShotReduceScatter())
    optimizer, scheduler = handwritten.configure_optimizer(model, workload.num_steps)
    for inputs, targets in workload.batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        for part in own:  # The tokens of all ranks are in these gradients; the loss is the mean over the ranks.
            assert part.grad is not None
            part.grad /= size
        optimizer.step()
        scheduler.step()
        if not end_step(loss.detach()):
            return
