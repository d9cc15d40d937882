"""Read tensors of an accelerator without waiting for what the device has still to do."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DeferredRead"]


class DeferredRead:
    """Copy a tensor to the memory of the host in the background.

    A tensor of an accelerator is copied into pinned memory by the current stream, and an event says when the copy has
    ended. A tensor of the CPU is read at once.

    Args:
        tensor: The tensor; operations of the current stream may change it afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            self._value, self._event = tensor.clone(), None
            return
        self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._value.copy_(tensor, non_blocking=True)
        self._event = torch.get_device_module(tensor.device.type).current_stream(tensor.device).record_event()

    @property
    def is_ready(self) -> bool:
        """Return whether :meth:`result` would return at once."""
        return self._event is None or bool(self._event.query())

    def result(self) -> Tensor:
        """Return the values as a tensor of the CPU, and wait for the copy if it has not ended."""
        if self._event is not None:
            self._event.synchronize()
        return self._value
