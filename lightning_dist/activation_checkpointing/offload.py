"""Keep a block's activations in the memory of the CPU between its forward and its backward.

On an accelerator, copies run on a stream of their own, beside the computation. The compute stream waits for the copies
of a block only when the next block has been computed, and then frees the activations. In the backward, the activations
of a block are copied back while the block behind it is computed.

No memory is marked as used by two streams (``record_stream``): the allocator could then use it again only when the host
sees that the copies have ended, and a host that is far ahead of the device would need memory for all blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dist._compat import local_of, version_of

__all__ = ["Mover", "offload"]

MIN_NUMEL = 1024
"""Smallest number of elements of a tensor that is moved."""


def offload(block: nn.Module, mover: Mover) -> None:
    """Replace the forward of ``block`` by one whose activations are moved to the CPU, and back in the backward.

    Parameters, buffers and small tensors stay where they are; copies of parameters in another dtype, which autocast
    makes where nothing is sharded, are moved.

    Args:
        block: The block.
        mover: What moves the activations of all blocks of the model.
    """
    forward = block.forward

    @wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        mover.begin_block()
        with torch.autograd.graph.saved_tensors_hooks(_packer(block, mover), _unpacker(mover)):
            output = forward(*args, **kwargs)
        mover.end_block()
        return output

    block.forward = offloaded


class _Moved:
    """Hold a copy on the CPU, and the device to which it goes back.

    Args:
        copy: The copy, which is in pinned memory if it comes from an accelerator.
        device: The device.
        group: The activations of the same forward of a block; None: the device is the CPU.
    """

    def __init__(self, copy: Tensor, device: torch.device, group: _Group | None) -> None:
        self.copy = copy
        self.device = device
        self.group = group
        self.fetched: Tensor | None = None
        """The tensor on the device, from the beginning of its copy until it is used."""


class _Group:
    """Refer to the activations of one forward of a block, which the graph of autograd holds.

    Args:
        previous: The activations of the block before, which the backward needs next; None: there are none.
    """

    def __init__(self, previous: _Group | None) -> None:
        self.members: list[weakref.ref[_Moved]] = []
        self.previous = None if previous is None else weakref.ref(previous)
        self.is_fetched = False
        self.has_arrived: torch.Event | None = None
        """Event behind the copies to the device."""


class Mover:
    """Move activations of blocks between an accelerator and pinned memory, on a stream of its own."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._group: _Group | None = None
        self._last: weakref.ref[_Group] | None = None
        self._sources: list[Tensor] = []
        self._held: tuple[list[Tensor], torch.Event] | None = None

    def begin_block(self) -> None:
        """Begin the forward of a block."""
        self._group = _Group(None if self._last is None else self._last())

    def end_block(self) -> None:
        """Free the activations of the block before, once their copies have ended, and keep those of this block."""
        group, self._group = self._group, None
        self._release()
        if self._stream is not None and self._sources:
            self._held = self._sources, self._stream.record_event()
            self._sources = []
        self._last = None if group is None else weakref.ref(group)

    def to_host(self, tensor: Tensor) -> _Moved:
        """Begin to copy an activation to the memory of the CPU."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return _Moved(torch.empty_like(tensor).copy_(tensor), tensor.device, None)
        accelerator = torch.get_device_module(tensor.device.type)
        if self._stream is None:
            self._stream = accelerator.Stream()
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        self._sources.append(tensor)
        moved = _Moved(copy, tensor.device, self._group)
        if self._group is not None:
            self._group.members.append(weakref.ref(moved))
        return moved

    def to_device(self, moved: _Moved) -> Tensor:
        """Return an activation on its device, and begin to copy those that the backward needs next."""
        group = moved.group
        if group is None:
            return moved.copy
        self._release()
        if not group.is_fetched:
            self._fetch(group)
        if moved.fetched is None:  # The backward runs for the second time.
            return moved.copy.to(moved.device, non_blocking=True)
        assert group.has_arrived is not None
        torch.get_device_module(moved.device.type).current_stream().wait_event(group.has_arrived)
        tensor, moved.fetched = moved.fetched, None
        previous = None if group.previous is None else group.previous()
        if previous is not None and not previous.is_fetched:
            self._fetch(previous)
        return tensor

    def _fetch(self, group: _Group) -> None:
        """Begin to copy activations to memory of the current stream, after what the stream has still to do there."""
        group.is_fetched = True
        members = [moved for member in group.members if (moved := member()) is not None]
        if not members:
            return
        accelerator = torch.get_device_module(members[0].device.type)
        for moved in members:
            moved.fetched = torch.empty_like(moved.copy, device=moved.device, pin_memory=False)
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            for moved in members:
                assert moved.fetched is not None
                moved.fetched.copy_(moved.copy, non_blocking=True)
        group.has_arrived = self._stream.record_event()

    def _release(self) -> None:
        """Let the current stream wait for the copies of the block before, so that their sources can be freed."""
        if self._held is None:
            return
        (sources, event), self._held = self._held, None
        torch.get_device_module(sources[0].device.type).current_stream().wait_event(event)


class _Unmoved(NamedTuple):
    """Hold a tensor itself, and its version, by which a later change in place is noticed; None: it is not checked."""

    tensor: Tensor
    version: int | None


def _packer(block: nn.Module, mover: Mover) -> Callable[[Tensor], _Moved | _Unmoved]:
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
        return mover.to_host(tensor)

    return pack


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


def _unpacker(mover: Mover) -> Callable[[_Moved | _Unmoved], Tensor]:
    def unpack(packed: _Moved | _Unmoved) -> Tensor:
        if isinstance(packed, _Moved):
            return mover.to_device(packed)
        if packed.version is not None and version_of(packed.tensor) != packed.version:
            raise RuntimeError(
                "activation_checkpointing='offload': a tensor of shape"
                f" {tuple(packed.tensor.shape)} that the backward needs was changed in place after it was computed with."
            )
        return packed.tensor

    return unpack
