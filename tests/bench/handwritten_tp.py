"""Train the examples' GPT without Lightning, split over two ranks by torch's DTensor and sharded over the others.

This follows torchtitan's Llama 3 (v0.2.2, ``torchtitan/models/llama3/infra/parallelize.py``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from examples.gpt.model import GPT
from tests.bench import handwritten
from tests.bench.harness import EndStep
from tests.bench.workload import Workload

__all__ = ["train"]

TP_SIZE = 2


def train(workload: Workload, end_step: EndStep) -> None:
    """Train until ``end_step``, which is called with the loss after every step, returns False."""
    dp_size = dist.get_world_size() // TP_SIZE
    mesh = init_device_mesh("cpu", (dp_size, TP_SIZE), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(workload.seed)
    model = GPT(**workload.model)
    _split(model, mesh["tp"])
    if dp_size > 1:
        handwritten.shard(model, mesh["dp_shard"], two_shot=True)

    optimizer, scheduler = handwritten.configure_optimizer(model, workload.num_steps)
    for inputs, targets in workload.batches(dp_size, mesh["dp_shard"].get_local_rank()):
        optimizer.zero_grad()
        with loss_parallel():
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        scheduler.step()
        assert isinstance(loss, DTensor)  # It is replicated, so its local value is the loss on both ranks.
        if not end_step(loss.detach().to_local()):
            return


def _split(model: GPT, mesh: DeviceMesh) -> None:
    """Split the layers and the vocabulary; between layers, hidden states are split along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
