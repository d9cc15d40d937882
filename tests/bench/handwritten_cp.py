"""Train the examples' GPT without Lightning, with sequences split over ranks by all-to-alls written into the model.

Attention follows DeepSpeed-Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509). Everything else computes on
a rank's tokens, from the embedding to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from examples.gpt.model import GPT, Attention
from tests.bench import handwritten
from tests.bench.harness import EndStep
from tests.bench.workload import Workload

__all__ = ["train"]


class _Exchange(torch.autograd.Function):
    """Send slice ``i`` of the first dimension to rank ``i``, and receive one slice from each."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sent = gradient.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received


def _attend(self: Attention, x: Tensor) -> Tensor:
    """Compute attention for ``x`` of shape ``(batch, own tokens, dim)``, with the whole sequence for some heads."""
    size, own = dist.get_world_size(), x.size(1)
    batch, head_dim = x.size(0), self.head_dim
    qkv = torch.stack((self.query(x), self.key(x), self.value(x)))
    # (3, batch, tokens, ranks, heads, head_dim) -> (ranks, 3, batch, heads, tokens, head_dim)
    sent = qkv.view(3, batch, own, size, -1, head_dim).permute(3, 0, 1, 4, 2, 5).contiguous()
    received: Tensor = _Exchange.apply(sent)  # type: ignore[no-untyped-call]
    query, key, value = received.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    mixed = functional.scaled_dot_product_attention(
        self.rotary(query.contiguous()), self.rotary(key.contiguous()), value.contiguous(), is_causal=True
    )
    back = mixed.unflatten(2, (size, own)).permute(2, 0, 1, 3, 4).contiguous()
    received = _Exchange.apply(back)  # type: ignore[no-untyped-call]
    return self.out(received.permute(1, 3, 0, 2, 4).flatten(2))


def train(workload: Workload, end_step: EndStep) -> None:
    """Train until ``end_step``, which is called with the loss after every step, returns False."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(workload.seed)
    model = GPT(**workload.model)
    for block in model.blocks:
        block.attention.forward = partial(_attend, block.attention)
    handwritten.shard(model, init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), two_shot=True)
    optimizer, scheduler = handwritten.configure_optimizer(model, workload.num_steps)
    for inputs, targets in _own_tokens(workload, size, rank):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        total = loss.detach()
        dist.all_reduce(total)
        if not end_step(total / size):
            return


def _own_tokens(workload: Workload, size: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's tokens of batches that are the same on all ranks."""
    for inputs, targets in workload.batches(1, 0):
        yield inputs.chunk(size, 1)[rank], targets.chunk(size, 1)[rank]
