"""Keep a block's activations in the memory of the CPU between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dist._compat import local_of, version_of

__all__ = ["offload"]

MIN_NUMEL = 1024
"""Smallest number of elements of a tensor that is moved."""


def offload(block: nn.Module) -> None:
    """Replace the forward of ``block`` by one whose activations are moved to the CPU, and back in the backward.

    Parameters, buffers and small tensors stay where they are; copies of parameters in another dtype, which autocast
    makes where nothing is sharded, are moved. From an accelerator, tensors are copied to pinned memory
    in the order of the current stream, without waiting for them.
    """
    forward = block.forward

    @wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_packer(block), _unpack):
            return forward(*args, **kwargs)

    block.forward = offloaded


class _Moved(NamedTuple):
    """Hold a copy on the CPU, and the device to which it goes back."""

    copy: Tensor
    device: torch.device


class _Unmoved(NamedTuple):
    """Hold a tensor itself, and its version, by which a later change in place is noticed; None: it is not checked."""

    tensor: Tensor
    version: int | None


def _packer(block: nn.Module) -> Callable[[Tensor], _Moved | _Unmoved]:
    tensors = map(local_of, _tensors(block))
    # Tensors of other classes, such as weights that are gathered in float8, have no memory of their own.
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)}

    def pack(tensor: Tensor) -> _Moved | _Unmoved:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return _Unmoved(tensor, None)
        if tensor.untyped_storage().data_ptr() in own:  # Gathering a parameter changes its version.
            return _Unmoved(tensor, None)
        if tensor.numel() < MIN_NUMEL:
            return _Unmoved(tensor, None if tensor.is_inference() else version_of(tensor))
        is_on_cpu = tensor.device.type == "cpu"
        copy = torch.empty_like(tensor, device="cpu", pin_memory=not is_on_cpu, requires_grad=False)
        return _Moved(copy.copy_(tensor.detach(), non_blocking=not is_on_cpu), tensor.device)

    return pack


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


def _unpack(packed: _Moved | _Unmoved) -> Tensor:
    if isinstance(packed, _Moved):
        return packed.copy.to(packed.device, non_blocking=True)
    if packed.version is not None and version_of(packed.tensor) != packed.version:
        raise RuntimeError(
            "activation_checkpointing='offload': a tensor of shape"
            f" {tuple(packed.tensor.shape)} that the backward needs was changed in place after it was computed with."
        )
    return packed.tensor
