"""Give every rank of a pipeline what a step has left on the last stage."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import functional

from lightning_dist._compat import simulated_backend
from lightning_dist.mesh.collectives import FlaggedBroadcast
from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.techniques.pipeline import Pipeline

__all__ = ["Results", "ResultsBroadcast"]

_ALIGNMENT = 16
"""Number of bytes to which the parts of a message are padded, so that each begins at an aligned address."""


class Results(NamedTuple):
    """Hold what a step leaves: its output, and the attributes, buffers and logged values that it changes."""

    output: Any
    logged: dict[Any, Any]
    attributes: list[tuple[Literal["append", "update", "set"], Any]]
    buffers: dict[str, Tensor]


class ResultsBroadcast:
    """Broadcast the results of a step from the last stage to all ranks of its pipeline.

    Python objects are sent on the host. Tensors of an accelerator are sent as one message by the device, for which no
    host waits; those of the CPU are sent with the objects.

    Args:
        pipeline: The pipeline, whose ranks all take part.
        on_host: Process group of its ranks, which uses gloo.
        device: Device on which the ranks get tensors.
    """

    def __init__(self, pipeline: Pipeline, on_host: dist.ProcessGroup, device: torch.device) -> None:
        self._pipeline = pipeline
        self._device = device
        self._objects = FlaggedBroadcast(on_host, pipeline.last_rank)

    def __call__(self, left: Callable[[], Results], has_failed: bool) -> Results | None:
        """Return the results of the last stage on all ranks. This is a collective over the pipeline.

        Args:
            left: Function that returns the results; it is called on the last stage only.
            has_failed: Whether the step has failed on this rank.

        Returns:
            The results; None if the step has failed on any rank of the pipeline. In a simulation of one rank, other
            ranks than the last get a loss of 0 and nothing else.

        Raises:
            OtherRankError: If the last stage could not merge or pickle the results; its rank raises the original error.
        """
        if simulated_backend() is not None:  # There is nobody to send to or to receive from.
            return left() if self._pipeline.is_last else Results(torch.zeros((), device=self._device), {}, [], {})
        content = b""
        error: Exception | None = None
        message = _Message(self._device)
        if self._pipeline.is_last:
            try:
                sent = None if has_failed else apply_to_collection(left(), Tensor, message.add)
                content = pickle.dumps((None, sent, message.num_bytes))
            except Exception as raised:  # The other ranks wait for the broadcast, so they are told of the error.
                error = raised
                content = pickle.dumps((f"{type(raised).__name__}: {raised}", None, 0))
        received_bytes, any_failed = self._objects(content, has_failed)
        if any_failed:
            return None
        why_not, told, num_bytes = pickle.loads(received_bytes)
        if why_not is not None:
            raise error or OtherRankError(f"The last stage could not send what the step returned or changed: {why_not}")
        received = message.broadcast(num_bytes, self._pipeline)
        results = apply_to_collection(told, _Sent, lambda tensor: tensor.taken(received, self._device))
        assert isinstance(results, Results)
        return results


class _Sent:
    """Stand for a tensor in a pickle.

    Args:
        place: The bytes of the elements, or the number of the first of these bytes in the device's message.
        dtype: The dtype of the elements.
        shape: The shape of the tensor.
    """

    def __init__(self, place: bytes | int, dtype: torch.dtype, shape: torch.Size) -> None:
        self._place, self._dtype, self._shape = place, dtype, shape

    def taken(self, message: Tensor | None, device: torch.device) -> Tensor:
        """Return the tensor on ``device``, out of the device's ``message`` or of the bytes in this object."""
        if isinstance(self._place, bytes):
            if not self._place:
                return torch.empty(self._shape, dtype=self._dtype, device=device)
            return torch.frombuffer(bytearray(self._place), dtype=self._dtype).view(self._shape).to(device)
        assert message is not None
        num_bytes = self._shape.numel() * self._dtype.itemsize
        return message[self._place : self._place + num_bytes].view(self._dtype).view(self._shape)


class _Message:
    """Collect the tensors of an accelerator that are sent as one message."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._parts: list[Tensor] = []

    def add(self, tensor: Tensor) -> _Sent | Tensor:
        """Return what stands for ``tensor`` in the pickle: a sparse tensor itself, detached and on the CPU."""
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.cpu()
        content = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        if tensor.device.type == "cpu" or not len(content):
            return _Sent(content.cpu().numpy().tobytes(), tensor.dtype, tensor.shape)
        place = self.num_bytes
        self._parts.append(functional.pad(content, (0, -len(content) % _ALIGNMENT)))
        self.num_bytes += len(self._parts[-1])
        return _Sent(place, tensor.dtype, tensor.shape)

    def broadcast(self, num_bytes: int, pipeline: Pipeline) -> Tensor | None:
        """Return the last stage's message; None if it is empty. This is a collective over the pipeline."""
        if not num_bytes:
            return None
        if self._parts:
            message = torch.cat(self._parts)
        else:
            message = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        dist.broadcast(message, group=pipeline.group, group_src=pipeline.last_rank)
        return message
