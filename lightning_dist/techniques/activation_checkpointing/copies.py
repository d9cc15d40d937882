"""Copy tensors of an accelerator to the memory of the host and back, beside what the device computes.

No memory is marked as used by two streams (``record_stream``): the allocator could use it again only when the host sees
that the copies have ended, so that a host which is far ahead of the device would need memory for all blocks. Instead,
the tensors of a call are kept until the next call has begun, and the current stream waits for their copies then.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dist._compat import version_of

__all__ = ["Call", "Copies", "MovedTensor"]


class MovedTensor:
    """Hold the values of a tensor in the memory of the host.

    Args:
        tensor: The tensor, which may be freed afterwards. It must not be changed while its copy may be under way.
        call: Call of a block that needs the tensor in its backward.
    """

    def __init__(self, tensor: Tensor, call: Call) -> None:
        self._call, self._device = call, tensor.device
        self._fetched: tuple[Tensor, torch.Event] | None = None
        self.was_changed = False
        """Whether the tensor was changed in place while its copy may have been under way."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            self._copy = torch.empty_like(tensor).copy_(tensor)
            return
        module, stream = torch.get_device_module(tensor.device.type), call.copies.to_host(tensor.device)
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            self._copy.copy_(tensor, non_blocking=True)
        self._is_copied = stream.record_event()
        call.add(self)
        call.copies.keep(_Kept(tensor, version_of(tensor), self._is_copied, weakref.ref(self)))

    def fetch(self) -> None:
        """Begin to copy the tensor back to its device, unless it was begun before."""
        if self._fetched is not None or self._device.type == "cpu":
            return
        module, stream = torch.get_device_module(self._device.type), self._call.copies.to_device(self._device)
        tensor = torch.empty_like(self._copy, device=self._device, pin_memory=False)
        stream.wait_stream(module.current_stream())  # It may still compute with what was in this memory.
        stream.wait_event(self._is_copied)
        with module.stream(stream):
            tensor.copy_(self._copy, non_blocking=True)
        self._fetched = tensor, stream.record_event()

    def __del__(self) -> None:
        if getattr(self, "_fetched", None) is not None:  # No backward has used the memory that is being written.
            self._take()

    def _take(self) -> Tensor:
        """Return the fetched tensor, for whose copy the current stream waits."""
        assert self._fetched is not None
        (tensor, event), self._fetched = self._fetched, None
        torch.get_device_module(self._device.type).current_stream().wait_event(event)
        return tensor

    def get(self) -> Tensor:
        """Return the tensor on its device, and begin to fetch the other tensors of the call, and those before it.

        Raises:
            RuntimeError: If the tensor was changed in place while its copy may have been under way.
        """
        if self._device.type == "cpu":
            return self._copy
        self._call.fetch()
        if self.was_changed:
            raise RuntimeError(
                f"activation_checkpointing='offload': a tensor of shape {tuple(self._copy.shape)} that the backward"
                " needs was changed in place after it was computed with."
            )
        self.fetch()  # A second backward of the same graph gets it again.
        return self._take()


class _Kept(NamedTuple):
    """Hold a tensor that is being copied to the host, its version, the event behind the copy, and the moved tensor."""

    tensor: Tensor
    version: int
    is_copied: torch.Event
    moved: weakref.ref[MovedTensor]


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
        self.copies.release()
        self._fetch_tensors()
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch_tensors()

    def _fetch_tensors(self) -> None:
        for reference in reversed(self._tensors):
            if (tensor := reference()) is not None:
                tensor.fetch()


class Copies:
    """Provide the streams of a model's copies, one in each direction, and record the last call of a block."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._last: weakref.ref[Call] | None = None
        self._kept: list[_Kept] = []
        self._kept_before: list[_Kept] = []

    def keep(self, kept: _Kept) -> None:
        """Keep a tensor of this call until the call after the next one begins, or a backward does."""
        self._kept.append(kept)

    def release(self) -> None:
        """Let the current stream wait for all copies to the host, and free the tensors that they were made of."""
        _wait_and_free(self._kept_before)
        _wait_and_free(self._kept)

    def begin_call(self) -> Call:
        """Return a new call of a block."""
        _wait_and_free(self._kept_before)
        self._kept_before, self._kept = self._kept, []
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


def _wait_and_free(kept: list[_Kept]) -> None:
    """Let the current stream wait for the last of some copies, made in order by one stream, and free the tensors."""
    if not kept:
        return
    torch.get_device_module(kept[-1].tensor.device.type).current_stream().wait_event(kept[-1].is_copied)
    for tensor, version, _, reference in kept:
        if version_of(tensor) != version and (moved := reference()) is not None:
            moved.was_changed = True
    kept.clear()
