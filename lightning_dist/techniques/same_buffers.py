"""Synchronize buffers, so that every rank begins a training step with those of the first rank, as with DDP.

Buffers such as BatchNorm's statistics are computed from each rank's own part of the batch. torch's
DistributedDataParallel broadcasts rank 0's buffers before a forward, unless the last backward did not reduce gradients.
Here large buffers are sent only if they changed on some rank since the last broadcast.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from lightning_dist._compat import NORM, backend_of, own_buffers, version_of
from lightning_dist.mesh.collectives import begin_are_same_numbers
from lightning_dist.mesh.flag_agreement import FlagAgreement
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = ["SameBuffers"]


_SMALL_BYTES = 2**18
"""Size of all buffers up to which they are always sent, which takes less time than to exchange which ones changed."""


_ALIGNMENT = 16
"""Number of bytes to which the parts of a message are padded."""


class SameBuffers(Technique):
    """Give all ranks of ``mesh`` the buffers of the first rank.

    Args:
        mesh: Device mesh of the ranks that have different parts of a batch.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._axes = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._mesh = mesh
        self._is_on_host = all(backend_of(group) == "gloo" for group in self._axes)
        self._agreement: FlagAgreement | None = None
        self._changed: list[bool] = []
        """For each buffer, whether it had changed on any rank at the last synchronization."""
        self._sizes: list[tuple[torch.dtype, torch.Size] | None] = []
        self._places: list[tuple[nn.Module, str]] = []
        self._seen: list[tuple[Tensor | None, int]] = []

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, whose buffers are synchronized."""
        self._module = parallel.module

    def finish(self) -> None:
        """Find the buffers of the module. Those that are registered later are not synchronized.

        This is a collective over the mesh if there are buffers that do not fit into one small message.
        """
        found: dict[int, tuple[nn.Module, str]] = {}
        for module in self._module.modules():
            for key, buffer in own_buffers(module).items():
                if buffer is not None and not is_remote(buffer):
                    found.setdefault(id(buffer), (module, key))
        self._places = list(found.values())
        if self._places and self._axes:
            # On the device's own groups, the host would wait for all that the device has still to do.
            ranks = self._mesh.mesh.flatten().tolist()
            self._agreement = FlagAgreement(ranks, "changed buffers", self._describe_flag)
        if self._axes and self._places and not (self._is_on_host and _are_small(self._buffers())):
            self._made_agreement()
        self._seen = [(None, -1)] * len(self._places)
        self._changed = [True] * len(self._places)

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
        buffers = self._buffers()
        if self._is_on_host and _are_small(buffers):
            for group in self._axes:
                self._broadcast_small(buffers, group)
        else:
            self._broadcast_changed(buffers)
        self._seen = [(buffer, -1 if buffer is None else version_of(buffer)) for buffer in buffers]

    def _buffers(self) -> list[Tensor | None]:
        return [own_buffers(module).get(key) for module, key in self._places]

    def _made_agreement(self) -> FlagAgreement:
        """Return the object by which ranks agree on changed buffers, and create it if needed. This is a collective."""
        if self._agreement is None:
            ranks = self._mesh.mesh.flatten().tolist()
            self._agreement = FlagAgreement(ranks, "changed buffers", self._describe_flag)
        return self._agreement

    def _broadcast_changed(self, buffers: Sequence[Tensor | None]) -> None:
        """Overwrite those ``buffers`` that changed on any rank since the last synchronization, in one message."""
        changed = [
            (isinstance(module, NORM) and module.training)
            or buffer is not seen
            or (buffer is not None and version_of(buffer) != version)
            for (module, _), buffer, (seen, version) in zip(self._places, buffers, self._seen, strict=True)
        ]
        sizes = [None if buffer is None else (buffer.dtype, buffer.shape) for buffer in buffers]
        agreement = self._made_agreement()
        has_other_sizes, *self._changed = agreement.agree([sizes != self._sizes, *changed], [False, *self._changed])
        if has_other_sizes:
            (is_same,) = begin_are_same_numbers([zlib.crc32(str(sizes).encode())], agreement.group)()
            if not is_same:
                self._refuse_other_sizes()
            self._sizes = sizes
        sent = [b for b, is_changed in zip(buffers, self._changed, strict=True) if is_changed and b is not None]
        if not sent:
            return
        # Parts of the message begin at addresses that are aligned for every dtype.
        parts = [functional.pad(_as_bytes(buffer), (0, -buffer.nbytes % _ALIGNMENT)) for buffer in sent]
        content = torch.cat(parts)
        for group in self._axes:
            dist.broadcast(content, group=group, group_src=0)
        if not any(group.rank() for group in self._axes):
            return
        for buffer, received in zip(sent, torch.split(content, [part.numel() for part in parts]), strict=True):
            # The copy does not count as a change of the buffer, because graphs of earlier steps may have saved it.
            buffer.data.copy_(received[: buffer.nbytes].view(buffer.dtype).view(buffer.shape))

    def _describe_flag(self, index: int) -> str:
        if index == 0:
            return "a buffer got another size"
        module, key = self._places[index - 1]
        prefix = next(name for name, other in self._module.named_modules() if other is module)
        return f"the buffer {'.'.join(filter(None, (prefix, key)))!r} was changed"

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
            self._refuse_other_sizes()
        for buffer, own in zip(present, received[1:], strict=True):
            if not torch.equal(own, _as_bytes(buffer)):
                # The message's parts are not aligned to elements. The copy does not count as a change of the buffer,
                # because graphs of earlier steps may have saved it.
                buffer.data.copy_(own.clone().view(buffer.dtype).view(buffer.shape))

    def _refuse_other_sizes(self) -> NoReturn:
        shapes = ", ".join(
            f"{name!r} {[*buffer.shape]}" for name, buffer in self._module.named_buffers() if not is_remote(buffer)
        )
        raise RuntimeError(
            "Every step begins with the buffers of the first rank, and buffers have other sizes on this rank:"
            f" {shapes}. Give them the same sizes on all ranks, or keep the tensor in a plain attribute."
        )


def _are_small(buffers: Sequence[Tensor | None]) -> bool:
    """Return whether ``buffers`` are plain tensors in the CPU's memory that fit into one small message."""
    present = [buffer for buffer in buffers if buffer is not None]
    return sum(buffer.nbytes for buffer in present) <= _SMALL_BYTES and all(
        type(buffer) is Tensor and buffer.device.type == "cpu" and buffer.layout is torch.strided for buffer in present
    )


def _as_bytes(buffer: Tensor) -> Tensor:
    return buffer.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
