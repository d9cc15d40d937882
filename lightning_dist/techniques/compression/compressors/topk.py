"""Send only the largest elements of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dist.techniques.compression.compressor import Compressor, Gradient, wide_dtype
from lightning_dist.techniques.compression.wire import Wire

__all__ = ["TopK"]

_MAX_BLOCK_SIZE = 2**15
"""Positions in a block are sent as integers of 8 or 16 bits."""

_ALIGNMENT = 8
"""Number of bytes at whose multiples a float64 may begin."""


class TopK(Compressor):
    """Send the elements of largest magnitude of each block of a gradient, with their positions.

    Sparse gradients with error feedback follow Stich et al. (2018), momentum correction with momentum factor masking
    Lin et al. (Deep Gradient Compression, 2018).

    Args:
        ratio: The fraction of the elements that is sent, above 0 and at most 1.
        block_size: Number of consecutive elements from which the largest ones are chosen, at most 32768. None: ``1 /
            ratio``, so that one element of each block is sent, because finding a single largest element is fastest.
        momentum: Momentum that each replica applies to its own gradients before they are compressed. The optimizer must
            then have none, because elements that are sent late would get its momentum late as well.
        kwargs: Arguments of :class:`~lightning_dist.techniques.compression.Compressor`.

    Raises:
        ValueError: If an argument is not valid.
    """

    per_replica: ClassVar[frozenset[str]] = frozenset({"residual", "velocity"})

    def __init__(
        self, ratio: float = 0.01, block_size: int | None = None, momentum: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio} must be above 0 and at most 1: it is the fraction that is sent.")
        if block_size is None:
            block_size = min(round(1 / ratio), _MAX_BLOCK_SIZE)
        if not 1 <= block_size <= _MAX_BLOCK_SIZE:
            raise ValueError(f"block_size={block_size} must be between 1 and {_MAX_BLOCK_SIZE}.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1.")
        if momentum and not self.error_feedback:
            raise ValueError(
                f"momentum={momentum} with error_feedback=False: the momentum of elements that are not sent would be"
                " lost. Leave error_feedback out, or set momentum=0 and use the optimizer's momentum."
            )
        self.ratio = ratio
        self.block_size = block_size
        self.momentum = momentum

    def average(self, gradients: Sequence[Gradient], wire: Wire) -> None:
        """Replace the values of ``gradients`` by the means of what the replicas send. This is a collective."""
        if self.momentum:
            self._add_velocity(gradients)
        inputs = self.add_residuals(gradients)
        dtype = wide_dtype(inputs[0])
        values, positions = [], []
        position_dtype = torch.uint8 if self.block_size <= 256 else torch.int16
        for gradient, value in zip(gradients, inputs, strict=True):
            velocities = self._blocks(gradient.state["velocity"]) if self.momentum else None
            for blocks in self._blocks(value):
                chosen = self._largest(blocks)
                values.append(blocks.gather(1, chosen).to(dtype).view(-1))
                positions.append(chosen.to(position_dtype).view(-1))
                if self.error_feedback:
                    blocks.scatter_(1, chosen, 0.0)
                if velocities is not None:
                    next(velocities).scatter_(1, chosen, 0.0)
        num_sent = sum(part.numel() for part in values)
        num_bytes = num_sent * (dtype.itemsize + position_dtype.itemsize)
        # Each replica's row must begin where its numbers are aligned.
        own = torch.zeros(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=values[0].device)
        own[: num_sent * dtype.itemsize].view(dtype).copy_(torch.cat(values))
        own[num_sent * dtype.itemsize : num_bytes].view(position_dtype).copy_(torch.cat(positions))
        for gradient in gradients:
            gradient.value.zero_()
        for sent in wire.gather(own):
            sent_values = sent[: num_sent * dtype.itemsize]
            sent_positions = sent[num_sent * dtype.itemsize : num_bytes]
            self._add(gradients, sent_values.view(dtype) / wire.size, sent_positions.view(position_dtype).long())

    def _add(self, gradients: Sequence[Gradient], values: Tensor, positions: Tensor) -> None:
        """Add the elements that one replica has sent to the values of ``gradients``."""
        begin = 0
        for gradient in gradients:
            for blocks in self._blocks(gradient.value):
                shape = (len(blocks), self._num_sent(blocks))
                end = begin + shape[0] * shape[1]
                chosen = positions[begin:end].view(shape)
                blocks.scatter_add_(1, chosen, values[begin:end].view(shape).to(blocks.dtype))
                begin = end

    def _add_velocity(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            velocity = gradient.state.get("velocity")
            if velocity is None:
                velocity = gradient.state["velocity"] = torch.zeros_like(
                    gradient.value, dtype=wide_dtype(gradient.value)
                )
            gradient.value.copy_(velocity.mul_(self.momentum).add_(gradient.value))

    def _blocks(self, value: Tensor) -> Iterator[Tensor]:
        """Yield the elements of ``value`` as matrices whose rows are blocks: all whole blocks, and a shorter last one.

        The matrices are views of ``value``.
        """
        flat = value.view(-1)
        num_whole = flat.numel() // self.block_size * self.block_size
        if num_whole:
            yield flat[:num_whole].view(-1, self.block_size)
        if num_whole < flat.numel():
            yield flat[num_whole:].view(1, -1)

    def _largest(self, blocks: Tensor) -> Tensor:
        """Return the positions of the elements of each block that are sent, of shape ``(blocks, number)``."""
        number, magnitudes = self._num_sent(blocks), blocks.abs()
        if number == 1:
            return magnitudes.max(dim=1, keepdim=True).indices
        return magnitudes.topk(number, dim=1, sorted=False).indices

    def _num_sent(self, blocks: Tensor) -> int:
        """Return the number of elements of each block that are sent, at least one."""
        return max(1, round(self.ratio * blocks.shape[1]))

    def describe(self) -> dict[str, Any]:
        """Return the arguments that matter for the results."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        return {"ratio": self.ratio, **momentum, **super().describe()}
