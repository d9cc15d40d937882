"""Keep a block's activations in the memory of the CPU between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist._compat import local_of

__all__ = ["offload"]

MIN_NUMEL = 1024
"""Smallest number of elements of a tensor that is moved."""


def offload(block: nn.Module) -> None:
    """Replace the forward of ``block`` by one whose activations are moved to the CPU, and back in the backward.

    Parameters, buffers and small tensors stay where they are. From an accelerator, tensors are copied to pinned memory
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


_Packed = tuple[torch.device | None, Tensor]


def _packer(block: nn.Module) -> Callable[[Tensor], _Packed]:
    own = {local_of(tensor).untyped_storage().data_ptr() for tensor in _tensors(block)}

    def pack(tensor: Tensor) -> _Packed:
        """Return a copy on the CPU and the device to which it goes back; or the tensor itself and None."""
        if tensor.numel() < MIN_NUMEL or type(tensor) is not Tensor:
            return None, tensor
        is_own = tensor.untyped_storage().data_ptr() in own
        if is_own:
            return None, tensor
        if tensor.device.type == "cpu":
            return tensor.device, tensor.detach().clone()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return tensor.device, copy.copy_(tensor.detach(), non_blocking=True)

    return pack


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


def _unpack(packed: _Packed) -> Tensor:
    device, tensor = packed
    return tensor if device is None else tensor.to(device, non_blocking=True)
