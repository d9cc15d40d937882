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

from lightning_dist._compat import NORM
from lightning_dist.collectives import max_of_flags
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
        self._are_small = False
        self._seen: list[tuple[Tensor | None, int]] = []

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, whose buffers are synchronized."""
        self._module = parallel.module

    def finish(self) -> None:
        """Find the buffers of the module. Those that are registered later are not synchronized.

        This is a collective over the mesh if its devices are accelerators.
        """
        found: dict[int, tuple[nn.Module, str]] = {}
        for module in self._module.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and not is_remote(buffer):
                    found.setdefault(id(buffer), (module, key))
        self._places = list(found.values())
        buffers = [module._buffers[key] for module, key in self._places]
        self._are_small = sum(buffer.nbytes for buffer in buffers if buffer is not None) <= _SMALL_BYTES and all(
            type(buffer) is Tensor and buffer.device.type == "cpu" and buffer.layout is torch.strided
            for buffer in buffers
        )
        if self._mesh.device_type != "cpu" and self._places and self._axes:
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
        """Overwrite the buffers that changed on any rank since the last call by those of the first rank.

        This is a collective over the mesh if the module has buffers.
        """
        if not self._places or not self._axes:
            return
        buffers = [module._buffers.get(key) for module, key in self._places]
        if self._are_small:
            for group in self._axes:
                _broadcast_small([buffer for buffer in buffers if buffer is not None], group)
            return
        flags = torch.tensor(
            [
                (isinstance(module, NORM) and module.training)
                or buffer is not seen
                or (buffer is not None and buffer._version != version)
                for (module, _), buffer, (seen, version) in zip(self._places, buffers, self._seen, strict=True)
            ],
            dtype=torch.uint8,
        )
        for flag_group in self._flag_groups:
            alive = flag_group()
            assert alive is not None
            flags = max_of_flags(flags, alive)
        changed = [buffer for buffer, flag in zip(buffers, flags.tolist(), strict=True) if flag and buffer is not None]
        for group in self._axes:
            sent = [buffer.contiguous() for buffer in changed]
            for work in [dist.broadcast(buffer, group=group, group_src=0, async_op=True) for buffer in sent]:
                work.wait()
            for buffer, received in zip(changed, sent, strict=True):
                if received.data_ptr() != buffer.data_ptr():
                    buffer.copy_(received)
        self._seen = [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]


def _broadcast_small(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``buffers`` in the CPU's memory by those of the first rank, in one message.

    Buffers that are equal are not written to, because a graph may have saved them for its backward. This is a
    collective over ``group``.
    """
    content = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(content, group=group, group_src=0)
    if group.rank() == 0:
        return
    for buffer, received in zip(buffers, torch.split(content, [buffer.nbytes for buffer in buffers]), strict=True):
        # The parts of the message are not aligned to the elements.
        values = received.clone().view(buffer.dtype).view(buffer.shape)
        if not torch.equal(values.view(-1).view(torch.uint8), buffer.reshape(-1).view(torch.uint8)):
            buffer.copy_(values)
