"""Shard and train the examples' GPT without Lightning, as torch's documentation of ``fully_shard`` shows."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from examples.gpt.model import GPT
from lightning_dist.mesh.collectives import TwoShotReduceScatter
from tests.bench.harness import EndStep
from tests.bench.workload import Workload

__all__ = ["configure_optimizer", "shard", "train", "train_alone", "train_ddp"]


def train(
    workload: Workload,
    end_step: EndStep,
    dp_replicate_size: int = 1,
    two_shot: bool = False,
    offloads: bool = False,
    in_bfloat16: bool = False,
) -> None:
    """Train until ``end_step`` returns False.

    Args:
        workload: Size of the model, and the data.
        end_step: Function that is called with the loss after every step.
        dp_replicate_size: Number of replicas; with one, the mesh has one dimension.
        two_shot: Whether to reduce-scatter as the project's strategies do on gloo, instead of with the backend's own
            implementation.
        offloads: Whether FSDP2 keeps shards and the optimizer's states in the memory of the CPU.
        in_bfloat16: Whether parameters are gathered in bfloat16 and steps run under autocast, while parameters are
            stored and gradients are reduced in float32, as with ``precision="bf16-mixed"``.
    """
    world_size = dist.get_world_size()
    if dp_replicate_size == 1:
        mesh = init_device_mesh(workload.device, (world_size,), mesh_dim_names=("dp_shard",))
    else:
        sizes = (dp_replicate_size, world_size // dp_replicate_size)
        mesh = init_device_mesh(workload.device, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))

    torch.manual_seed(workload.seed)
    model = GPT(**workload.model).to(workload.device)
    shard(model, mesh, two_shot, offloads, in_bfloat16)

    optimizer, scheduler = configure_optimizer(model, workload.num_steps)
    _loop(model, optimizer, scheduler, workload, end_step, in_bfloat16)


def train_alone(workload: Workload, end_step: EndStep, in_bfloat16: bool = False) -> None:
    """Train in one process, without anything around the model, until ``end_step`` returns False.

    Args:
        workload: Size of the model, and the data.
        end_step: Function that is called with the loss after every step.
        in_bfloat16: Whether steps run under autocast, as with ``precision="bf16-mixed"``.
    """
    torch.manual_seed(workload.seed)
    model = GPT(**workload.model).to(workload.device)
    optimizer, scheduler = configure_optimizer(model, workload.num_steps)
    _loop(model, optimizer, scheduler, workload, end_step, in_bfloat16)


def train_ddp(
    workload: Workload, end_step: EndStep, powersgd_rank: int | None = None, in_bfloat16: bool = False
) -> None:
    """Train by DistributedDataParallel, with its default arguments, until ``end_step`` returns False.

    Args:
        workload: Size of the model, and the data.
        end_step: Function that is called with the loss after every step.
        powersgd_rank: Rank of torch's own PowerSGD hook; None: gradients are not compressed.
        in_bfloat16: Whether steps run under autocast, as with ``precision="bf16-mixed"``.
    """
    torch.manual_seed(workload.seed)
    # torch's PowerSGD hook sends further messages from callbacks. With several buckets their order differs between
    # ranks, which ends the processes over gloo. One bucket has all gradients.
    model = GPT(**workload.model).to(workload.device)
    model = DistributedDataParallel(model, bucket_cap_mb=None if powersgd_rank is None else 10_000)
    if powersgd_rank is not None:
        state = PowerSGDState(None, matrix_approximation_rank=powersgd_rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer, scheduler = configure_optimizer(model, workload.num_steps)
    _loop(model, optimizer, scheduler, workload, end_step, in_bfloat16)


def _loop(
    model: torch.nn.Module,
    optimizer: AdamW,
    scheduler: LambdaLR,
    workload: Workload,
    end_step: EndStep,
    in_bfloat16: bool = False,
) -> None:
    for inputs, targets in workload.batches():
        optimizer.zero_grad()
        with torch.autocast(workload.device, torch.bfloat16, enabled=in_bfloat16):
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        if not end_step(loss.detach()):
            return


def shard(model: GPT, mesh: DeviceMesh, two_shot: bool, offloads: bool = False, in_bfloat16: bool = False) -> None:
    """Shard each block, then the remaining parameters of the model.

    Args:
        model: The model with whole parameters, which is sharded in place.
        mesh: Device mesh of one dimension, or of two: replicas and shards.
        two_shot: Whether to reduce-scatter as the project's strategies do on gloo, as for :func:`train`.
        offloads: Whether shards are kept in the memory of the CPU, which cannot be pinned without an accelerator.
        in_bfloat16: Whether parameters are gathered in bfloat16 and gradients reduced in float32.
    """
    offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if in_bfloat16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=offload, mp_policy=dtypes)
    fully_shard(model, mesh=mesh, offload_policy=offload, mp_policy=dtypes)
    if two_shot:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(TwoShotReduceScatter())


def configure_optimizer(model: torch.nn.Module, num_steps: int) -> tuple[AdamW, LambdaLR]:
    """Make the optimizer and the learning rate schedule of ``GPTModule`` with its default arguments."""
    lr, weight_decay, warmup_steps, min_lr_ratio = 3e-3, 0.1, 40, 0.05
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=lr, betas=(0.9, 0.95))

    def lr_scale(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (num_steps - warmup_steps))
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return optimizer, LambdaLR(optimizer, lr_scale)
