"""Synchronize buffers, so that every rank begins a training step with those of the first rank, as with DDP.

Buffers such as BatchNorm's statistics are computed from each rank's own part of the batch. torch's
DistributedDataParallel broadcasts rank 0's buffers before a forward, unless the last backward did not reduce gradients.
Here large buffers are sent only if they changed on some rank since the last broadcast.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist._compat import NORM, own_buffers, version_of
from lightning_dist.collectives import any_of_flags
from lightning_dist.technique import Parallel, Technique
from lightning_dist.tensor_state import is_remote

__all__ = ["SameBuffers"]


_SMALL_BYTES = 2**18
"""Size of all buffers up to which they are always sent, which takes less time than to exchange which ones changed."""


class SameBuffers(Technique):
    """Give all ranks of ``mesh`` the buffers of the first rank.

    Args:
        mesh: Device mesh of the ranks that have different parts of a batch.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._axes = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._mesh = mesh
        self._flag_groups = [weakref.ref(group) for group in self._axes]
        """The process groups over which flags on the host are exchanged."""
        self._places: list[tuple[nn.Module, str]] = []
        self._seen: list[tuple[Tensor | None, int]] = []

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, whose buffers are synchronized."""
        self._module = parallel.module

    def finish(self) -> None:
        """Find the buffers of the module. Those that are registered later are not synchronized.

        This is a collective over the mesh unless its backend is gloo.
        """
        found: dict[int, tuple[nn.Module, str]] = {}
        for module in self._module.modules():
            for key, buffer in own_buffers(module).items():
                if buffer is not None and not is_remote(buffer):
                    found.setdefault(id(buffer), (module, key))
        self._places = list(found.values())
        if self._places and any(dist.get_backend(group) != "gloo" for group in self._axes):
            # On the device's own groups, the host would wait for all that the device has still to do.
            ranks = self._mesh.mesh.flatten().tolist()
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="changed buffers")
            self._flag_groups = [weakref.ref(group)]
        self._seen = [(None, -1)] * len(self._places)

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Synchronize buffers if a new accumulation begins. This is a collective in that case."""
        if begins_accumulation:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Overwrite the buffers by those of the first rank; large ones only if they changed on any rank.

        This is a collective over the mesh if the module has buffers.

        Raises:
            RuntimeError: If buffers have other sizes on this rank than on the first one.
        """
        if not self._places or not self._axes:
            return
        buffers = [own_buffers(module).get(key) for module, key in self._places]
        if _are_small(buffers):
            for group in self._axes:
                self._broadcast_small(buffers, group)
        else:
            self._broadcast_changed(buffers)
        self._seen = [(buffer, -1 if buffer is None else version_of(buffer)) for buffer in buffers]

    def _broadcast_changed(self, buffers: Sequence[Tensor | None]) -> None:
        """Overwrite those ``buffers`` that changed on any rank since the last synchronization."""
        flags = [
            (isinstance(module, NORM) and module.training)
            or buffer is not seen
            or (buffer is not None and version_of(buffer) != version)
            for (module, _), buffer, (seen, version) in zip(self._places, buffers, self._seen, strict=True)
        ]
        for flag_group in self._flag_groups:
            alive = flag_group()
            assert alive is not None
            flags = any_of_flags(flags, alive)
        changed = [buffer for buffer, flag in zip(buffers, flags, strict=True) if flag and buffer is not None]
        for group in self._axes:
            sent = [buffer.resolve_conj().resolve_neg().contiguous() for buffer in changed]
            for work in [dist.broadcast(buffer, group=group, group_src=0, async_op=True) for buffer in sent]:
                work.wait()
            for buffer, received in zip(changed, sent, strict=True):
                if received.data_ptr() != buffer.data_ptr():
                    buffer.copy_(received)

    def _broadcast_small(self, buffers: Sequence[Tensor | None], group: dist.ProcessGroup) -> None:
        """Overwrite ``buffers`` in one message. Those that are equal are not written to."""
        present = [buffer for buffer in buffers if buffer is not None]
        if not present:
            return
        sizes = [buffer.nbytes for buffer in present]
        digest = torch.tensor([hash(tuple(sizes))]).view(torch.uint8)
        content = torch.cat([digest, *map(_as_bytes, present)])
        dist.broadcast(content, group=group, group_src=0)
        received = torch.split(content, [digest.numel(), *sizes])
        if group.rank() == 0:
            return
        if not torch.equal(received[0], digest):
            shapes = ", ".join(
                f"{name!r} {[*buffer.shape]}" for name, buffer in self._module.named_buffers() if not is_remote(buffer)
            )
            raise RuntimeError(
                "Every step begins with the buffers of the first rank, and buffers have other sizes on this rank:"
                f" {shapes}. Give them the same sizes on all ranks, or keep the tensor in a plain attribute."
            )
        for buffer, own in zip(present, received[1:], strict=True):
            if not torch.equal(own, _as_bytes(buffer)):
                # The message's parts are not aligned to elements. The copy does not count as a change of the buffer,
                # because graphs of earlier steps may have saved it.
                buffer.data.copy_(own.clone().view(buffer.dtype).view(buffer.shape))


def _are_small(buffers: Sequence[Tensor | None]) -> bool:
    """Return whether ``buffers`` are plain tensors in the CPU's memory that fit into one small message."""
    present = [buffer for buffer in buffers if buffer is not None]
    return sum(buffer.nbytes for buffer in present) <= _SMALL_BYTES and all(
        type(buffer) is Tensor and buffer.device.type == "cpu" and buffer.layout is torch.strided for buffer in present
    )


def _as_bytes(buffer: Tensor) -> Tensor:
    return buffer.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
