"""Keep a block's activations in the memory of the CPU between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dist._compat import local_of, version_of
from lightning_dist.techniques.activation_checkpointing.copies import Call, Copies, MovedTensor

__all__ = ["offload"]

MIN_NUMEL = 1024
"""Smallest number of elements of a tensor that is moved."""


def offload(block: nn.Module, copies: Copies | None = None) -> None:
    """Replace the forward of ``block`` by one whose activations are moved to the CPU, and back in the backward.

    Parameters, buffers and small tensors stay where they are; copies of parameters in another dtype, which autocast
    makes where nothing is sharded, are moved. From an accelerator, tensors are copied to pinned memory by a stream of
    their own, beside what the current stream computes. In the backward, another stream copies the tensors of a call
    back while the backward of the call after it is computed.

    Args:
        block: A module whose ``forward`` is replaced on the instance.
        copies: The copies of the whole model; None: the block is the only one.
    """
    forward, copies = block.forward, copies or Copies()

    @wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_packer(block, copies.begin_call()), _unpack):
            return forward(*args, **kwargs)

    block.forward = offloaded


class _Unmoved(NamedTuple):
    """Hold a tensor itself, and its version, by which a later change in place is noticed; None: it is not checked."""

    tensor: Tensor
    version: int | None


def _packer(block: nn.Module, call: Call) -> Callable[[Tensor], MovedTensor | _Unmoved]:
    tensors = map(local_of, _tensors(block))
    # Tensors of other classes, such as weights that are gathered in float8, have no memory of their own.
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)}

    def pack(tensor: Tensor) -> MovedTensor | _Unmoved:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return _Unmoved(tensor, None)
        if tensor.untyped_storage().data_ptr() in own:  # Gathering a parameter changes its version.
            return _Unmoved(tensor, None)
        if tensor.numel() < MIN_NUMEL:
            return _Unmoved(tensor, None if tensor.is_inference() else version_of(tensor))
        return MovedTensor(tensor, call)

    return pack


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


def _unpack(packed: MovedTensor | _Unmoved) -> Tensor:
    if isinstance(packed, MovedTensor):
        return packed.get()
    if packed.version is not None and version_of(packed.tensor) != packed.version:
        raise RuntimeError(
            "activation_checkpointing='offload': a tensor of shape"
            f" {tuple(packed.tensor.shape)} that the backward needs was changed in place after it was computed with."
        )
    return packed.tensor
