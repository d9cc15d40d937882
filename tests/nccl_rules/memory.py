"""Read and write the memory of tensors without autograd, modes and versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Device", "bytes_of", "device", "poison", "raw", "use_device"]


class Device:
    """Describe where the tensors are that the backend sends; this one is the CPU, which has no streams."""

    type = "cpu"

    def group_class(self, default: type[Any]) -> type[Any]:
        """Return the class of process groups, which is ``default`` or a subclass of it."""
        return default

    def host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU that has the same memory as ``tensor``."""
        return tensor

    def begin(self, group: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """Record that an operation on the stream of a group begins, and return what :meth:`wait` is given."""

    def wait(self, token: Any) -> None:
        """Let the current stream wait for an operation."""


_device = Device()


def device() -> Device:
    """Return the device whose tensors the backend sends."""
    return _device


def use_device(other: Device) -> None:
    """Let the backend send tensors of another device. Call this before the backend is registered."""
    global _device
    _device = other


@contextmanager
def raw() -> Iterator[None]:
    """Run operations in this context without modes, torch functions, autograd and inference mode."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as a tensor of bytes in one dimension, on the host."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    if tensor.device.type != "cpu":
        return _device.host(tensor.detach().as_strided((tensor.numel(),), (1,))).view(torch.uint8)
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,))


def poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with bytes of 0x5A if its dtype has no NaN."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        bytes_of(tensor).view(tensor.dtype).fill_(float("nan"))
    else:
        bytes_of(tensor).fill_(0x5A)
