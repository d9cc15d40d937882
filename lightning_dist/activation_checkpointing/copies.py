"""Copy tensors of an accelerator to the memory of the host and back, beside what the device computes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Copies", "MovedTensor"]


class MovedTensor:
    """Hold the values of a tensor in the memory of the host.

    Args:
        tensor: The tensor, which may be changed or freed afterwards.
        call: Call of a block that needs the tensor in its backward.
    """

    def __init__(self, tensor: Tensor, call: Call) -> None:
        self._call, self._device = call, tensor.device
        self._fetched: tuple[Tensor, torch.Event] | None = None
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            self._copy = torch.empty_like(tensor).copy_(tensor)
            return
        module, stream = torch.get_device_module(tensor.device.type), call.copies.to_host(tensor.device)
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            self._copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self._is_copied = stream.record_event()
        call.add(self)

    def fetch(self) -> None:
        """Begin to copy the tensor back to its device, unless it was begun before."""
        if self._fetched is not None or self._device.type == "cpu":
            return
        module, stream = torch.get_device_module(self._device.type), self._call.copies.to_device(self._device)
        stream.wait_event(self._is_copied)
        with module.stream(stream):
            tensor = self._copy.to(self._device, non_blocking=True)
        self._fetched = tensor, stream.record_event()

    def get(self) -> Tensor:
        """Return the tensor on its device, and begin to fetch the other tensors of the call, and those before it."""
        if self._device.type == "cpu":
            return self._copy
        self._call.fetch()
        self.fetch()  # A second backward of the same graph gets it again.
        assert self._fetched is not None
        (tensor, event), self._fetched = self._fetched, None
        stream = torch.get_device_module(self._device.type).current_stream()
        stream.wait_event(event)
        tensor.record_stream(stream)
        return tensor


class Call:
    """Represent a call of a block, and the tensors that its backward needs.

    Args:
        copies: The copies of the model.
        before: The previous call of a block, whose backward usually follows this one's.
    """

    def __init__(self, copies: Copies, before: Call | None) -> None:
        self.copies = copies
        self._before = None if before is None else weakref.ref(before)
        self._tensors: list[weakref.ref[MovedTensor]] = []
        self._is_fetched = False

    def add(self, tensor: MovedTensor) -> None:
        """Add a tensor that was moved."""
        self._tensors.append(weakref.ref(tensor))

    def fetch(self) -> None:
        """Begin to copy back the tensors of this call and of the one before it, when the first of them is needed."""
        if self._is_fetched:
            return
        self._is_fetched = True
        self._fetch_tensors()
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch_tensors()

    def _fetch_tensors(self) -> None:
        for reference in reversed(self._tensors):
            if (tensor := reference()) is not None:
                tensor.fetch()


class Copies:
    """Provide the streams of a model's copies, one in each direction, and know the last call of a block."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._last: weakref.ref[Call] | None = None

    def begin_call(self) -> Call:
        """Return a new call of a block."""
        call = Call(self, None if self._last is None else self._last())
        self._last = weakref.ref(call)
        return call

    def to_host(self, device: torch.device) -> Any:
        """Return the stream of copies to the host."""
        return self._stream(device, True)

    def to_device(self, device: torch.device) -> Any:
        """Return the stream of copies to the device."""
        return self._stream(device, False)

    def _stream(self, device: torch.device, is_to_host: bool) -> Any:
        key = device, is_to_host
        if key not in self._streams:
            self._streams[key] = torch.get_device_module(device.type).Stream(device)
        return self._streams[key]
