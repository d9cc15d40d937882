"""Predict what a rank needs of its device's memory, and which settings would lower it.

All sizes are bytes on one rank. With ``N`` ranks that shard and ``P`` bytes of parameters, gradients need ``P / N``
bytes, and the states of AdamW ``2 P / N``. A peak is the largest of these sums, where ``U`` is the size of the outer
units, which stay gathered, ``K`` that of the blocks that stay gathered after their forward, ``B`` that of the largest
block, and ``A`` that of the activations:

- At the beginning of the backward: parameters, states, buffers, ``U + K + A``, the gathered parameters of a block and
  of the one that is gathered meanwhile (``2 B``, unless they are in ``K``), and a block's gradients before and during
  their reduction (``2 B``).
- At the end of the backward: the same with all gradients instead of the activations and of ``K``; or the gradients of
  the outer units before and during their reduction (``2 U``) instead of those of a block.
- In the optimizer step: parameters, gradients, states and buffers; before it the gradients twice, if they are copied to
  be reduced between the replicas of an elastic run.

Where nothing is sharded, gradients are held twice at the end of a backward: as autograd has computed them, and in the
buckets that are reduced. The sums for sharding follow Zhao et al., 2023 (PyTorch FSDP), and Rajbhandari et al., 2020
(ZeRO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist._compat import local_of, tree_leaves, without_step_hooks
from lightning_dist.model.randomness import unchanged_random_numbers
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.whole_step import probe

__all__ = ["PART_BYTES", "MemoryUse", "RunSize", "Saving", "advise", "predict", "run_size", "state_bytes_per_element"]

PART_BYTES = 64 * 2**20
"""Size of the parameters that are on the device of the optimizer step at a time, if something is offloaded."""


@dataclass(frozen=True)
class RunSize:
    """Hold the sizes on which a rank's memory depends.

    Args:
        parameters: Bytes of the parameters that this rank has, as they are stored, times ``num_shards``.
        trainable: Bytes of those with gradients.
        elements: Number of elements of those with gradients.
        state_bytes: Bytes that the optimizers keep for each element.
        buffers: Bytes of the buffers.
        num_shards: Number of ranks that share most parameters. Fewer share experts on ranks of their own.
        outer: Bytes of the gathered outer units.
        block: Bytes of the largest gathered block.
        blocks: Bytes of all gathered blocks together.
        num_blocks: Number of blocks on this rank.
        frees_blocks: Whether blocks are freed after their forward.
        activations: Bytes that a forward keeps for the backward; None: unknown.
        recomputes: Whether blocks run again in the backward.
        rerun: Bytes of the activations of a block while it runs again.
        accumulates: Whether gradients of several backwards are added up before they are reduced.
        offloads_params: Whether shards of parameters and gradients are not on the device.
        offloads_gradients: Whether shards of gradients are not on the device.
        offloads_states: Whether the states of optimizers are not on the device.
        steps_in_backward: Whether the gradients of a block are used and freed before those of the next are computed.
        copies_gradients: Whether all gradients are copied when the backward has ended, to be reduced once more.
    """

    parameters: int
    trainable: int
    elements: int
    state_bytes: float
    buffers: int = 0
    num_shards: int = 1
    outer: int = 0
    block: int = 0
    blocks: int = 0
    num_blocks: int = 0
    frees_blocks: bool = True
    activations: int | None = None
    recomputes: bool = False
    rerun: int = 0
    accumulates: bool = False
    offloads_params: bool = False
    offloads_gradients: bool = False
    offloads_states: bool = False
    steps_in_backward: bool = False
    copies_gradients: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Hold the bytes of a rank's memory by what they are for, and the predicted peak, of which they are parts."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    activations: int | None
    peak: int


@dataclass(frozen=True)
class Saving:
    """Hold the change of a setting and how many bytes less the peak would be with it."""

    setting: str
    num_bytes: int


def predict(size: RunSize) -> MemoryUse:
    """Return the memory of a rank by the sums in the module's docstring."""
    is_sharded = size.num_shards > 1
    params = 0 if size.offloads_params else size.parameters // size.num_shards
    all_gradients = (size.block if size.steps_in_backward else size.trainable) // size.num_shards
    gradients = 0 if size.offloads_gradients else all_gradients
    all_states = int(size.state_bytes * size.elements) // size.num_shards
    states = 0 if size.offloads_states else all_states
    base, activations = params + states + size.buffers, size.activations or 0
    accumulated = 0
    if size.accumulates:
        accumulated = size.blocks + size.outer if is_sharded else size.trainable
    if is_sharded:
        kept = 0 if size.frees_blocks else size.blocks
        moving = 4 * size.block if size.frees_blocks else 2 * size.block
        begin = base + size.outer + kept + activations + size.rerun + moving + accumulated
        rest = size.rerun + activations // max(size.num_blocks, 1)
        end = base + gradients + size.outer + max(4 * size.block + rest, 2 * size.outer)
        gathered = size.outer + kept + moving
    else:
        begin = base + activations + size.rerun + accumulated
        end = base + 2 * gradients
        gathered = gradients
    step = base + (2 if size.copies_gradients else 1) * gradients
    if size.offloads_states or size.offloads_params:  # Parameters that are stepped, with gradients and states.
        part = min(PART_BYTES, all_gradients)
        step += part + int(part * size.state_bytes * size.elements / max(size.trainable, 1))
    return MemoryUse(params, gradients, states, size.buffers, gathered, size.activations, max(begin, end, step))


def advise(size: RunSize, num_replicas: int, only_files: bool) -> list[Saving]:
    """Return settings that would lower the predicted peak, the most effective first.

    Args:
        size: The sizes of the run.
        num_replicas: Number of replicas, over which the parameters could be sharded as well.
        only_files: Whether only offloading to files saves memory, because the device is the CPU.
    """
    activations = size.activations or 0
    inputs = activations // 20  # A block keeps about 20 times the size of its input.
    candidates: list[tuple[str, RunSize]] = []
    if num_replicas > 1:
        sharded = replace(size, num_shards=size.num_shards * num_replicas, frees_blocks=True)
        if size.num_shards == 1:
            sharded = replace(sharded, outer=size.parameters - size.blocks)
        candidates.append((f"strategy='full_shard' (over {sharded.num_shards} ranks)", sharded))
    if size.num_shards > 1 and not size.frees_blocks:
        candidates.append(("reshard_after_forward=True, or zero_stage=3", replace(size, frees_blocks=True)))
    if size.num_blocks and not size.recomputes and activations:
        rest = activations // size.num_blocks + inputs
        candidates.append(("activation_checkpointing='full'", replace(size, activations=min(rest, activations))))
        candidates.append(("activation_checkpointing='selective'", replace(size, activations=activations // 2)))
    where = ", offload_folder=<a folder on a local disk>" if only_files else ""
    if not size.offloads_states:
        candidates.append((f"offload='optimizer'{where}", replace(size, offloads_states=True)))
    if size.num_shards > 1 and not size.offloads_params:
        both = replace(size, offloads_params=True, offloads_gradients=not only_files, offloads_states=True)
        candidates.append((f"offload='both'{where}", both))
    if size.num_shards > 1 and not size.steps_in_backward and not size.accumulates:
        candidates.append(("step_in_backward=True", replace(size, steps_in_backward=True)))
    if activations:
        half = "half the batch size, and twice the accumulate_grad_batches"
        candidates.append((half, replace(size, activations=activations // 2)))
    if size.accumulates and size.num_shards > 1:
        candidates.append(("zero_stage=3 (reduces gradients in each backward)", replace(size, accumulates=False)))
    now = predict(size).peak
    savings = [Saving(setting, now - predict(changed).peak) for setting, changed in candidates]
    return sorted((saving for saving in savings if saving.num_bytes > 0), key=lambda saving: -saving.num_bytes)


def run_size(module: nn.Module, groups: Sequence[ParameterGroup], optimizers: Sequence[Optimizer]) -> RunSize:
    """Return the sizes of this rank's part of ``module``, without what only a strategy knows.

    Args:
        module: The module, which is parallel.
        groups: The parameter groups of its units.
        optimizers: The optimizers, whose states need not exist.
    """
    params = [param for group in groups for param in group.params if not is_remote(param)]
    trained = [param for param in params if param.requires_grad]
    num_shards = max((_num_shards(group) for group in groups), default=1)
    blocks = [group for group in groups if group.unit.kind in ("block", "large")]
    in_state = {
        id(group): state_bytes_per_element(optimizer, group, param.dtype)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in [param for param in group["params"] if param.is_floating_point() or param.is_complex()][:1]
    }
    return RunSize(
        parameters=num_shards * sum(local_of(param).nbytes for param in params),
        trainable=num_shards * sum(local_of(param).nbytes for param in trained),
        elements=num_shards * sum(local_of(param).numel() for param in trained),
        state_bytes=max(in_state.values(), default=0.0),
        buffers=sum(local_of(buffer).nbytes for buffer in module.buffers() if not is_remote(buffer)),
        num_shards=num_shards,
        outer=sum(group.gathered_bytes for group in groups if group not in blocks),
        block=max((group.gathered_bytes for group in blocks), default=0),
        blocks=sum(group.gathered_bytes for group in blocks),
        num_blocks=len(blocks),
        frees_blocks=any(group.is_freed_after_forward for group in blocks),
    )


def state_bytes_per_element(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> float:
    """Return how many bytes ``optimizer`` keeps for an element of a parameter.

    A copy of the optimizer makes a step with a small parameter to find out.

    Args:
        optimizer: The optimizer, which is not changed.
        group: The parameter group whose options count.
        dtype: Dtype of the parameter.

    Returns:
        The number of bytes; for an optimizer that cannot make such a step, that of AdamW.
    """
    param = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    original = next((one for one in group["params"] if one.is_floating_point() or one.is_complex()), None)
    if original is None:
        return 0.0

    def closure() -> Tensor:
        param.grad = torch.ones_like(param)
        return torch.ones(())

    try:
        # The other groups have no parameters, so that the copy leaves them out.
        stand_ins: list[dict[Tensor, Tensor]] = [
            {original: param} if other is group else {} for other in optimizer.param_groups
        ]
        copied = probe(optimizer, stand_ins, with_empty_groups=False)
        with unchanged_random_numbers(), without_step_hooks(copied), torch.enable_grad():
            if callable(train := getattr(copied, "train", None)):  # Schedule-free training begins with it.
                train()
            type(copied).step(copied, cast(Any, closure))
        values = [value for value in tree_leaves(copied.state[param]) if isinstance(value, Tensor) and value.ndim]
    except Exception:  # Its code may need other gradients, or parameters of the model.
        return 2.0 * dtype.itemsize
    return sum(value.nbytes for value in values) / param.numel()


def _num_shards(group: ParameterGroup) -> int:
    return group.mesh.size(group.mesh.ndim - 1) if group.is_sharded else 1
