"""Average gradients in two rounds, in each of which encoded numbers are sent.

In the first round each replica sends every other one that replica's chunk of the gradients. Each replica decodes and
averages the chunks that it gets, in float32, and sends their mean to all others in the second round. Sums of encoded
numbers, which could overflow or lose precision, are never computed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dist.techniques.compression.compressor import Compressor, Gradient, wide_dtype
from lightning_dist.techniques.compression.wire import Wire

__all__ = ["TwoShot"]


class TwoShot(Compressor):
    """Average encoded gradients in two rounds; subclasses say how numbers are encoded.

    With error feedback, a replica's residual also takes up what the second encoding of its own chunk lacks, times the
    number of replicas, because the mean of the residuals is what counts.
    """

    takes_any_shape = True

    block_size = 1
    """The number of elements of a chunk is a multiple of this."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes that are sent for ``rows``.

        Args:
            rows: Numbers in float32 or float64, of shape ``(n, numel)``; ``numel`` is a multiple of ``block_size``.

        Returns:
            A contiguous tensor of dtype uint8 with ``n`` rows.
        """

    @abstractmethod
    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers that ``rows``, from :meth:`encode`, stand for, of shape ``(n, numel)``."""

    def average(self, gradients: Sequence[Gradient], wire: Wire) -> None:
        """Replace the values of ``gradients`` by an approximation of their means. This is a collective."""
        inputs = self.add_residuals(gradients)
        dtype = wide_dtype(inputs[0])
        # Each gradient is divided among the replicas by itself, so that its mean does not depend on the others, which
        # may differ between ranks that hold the same parameter.
        per_row = self.block_size * wire.size
        lengths = [-(-value.numel() // per_row) * self.block_size for value in inputs]
        chunks = inputs[0].new_empty((wire.size, sum(lengths)), dtype=dtype)
        parts = torch.split(chunks, lengths, dim=1)
        for part, value in zip(parts, inputs, strict=True):
            _copy_in(part, value.reshape(-1))
        encoded = self.encode(chunks)
        if self.error_feedback:
            chunks.sub_(self.decode(encoded, dtype))
        mean = self.decode(wire.transpose(encoded), dtype).mean(dim=0, keepdim=True)
        reply = self.encode(mean)
        if self.error_feedback:
            chunks[wire.rank].add_(mean.sub_(self.decode(reply, dtype))[0], alpha=wire.size)
            for part, value in zip(parts, inputs, strict=True):
                _copy_out(part, value.view(-1))
        means = torch.split(self.decode(wire.gather(reply[0]), dtype), lengths, dim=1)
        for gradient, part in zip(gradients, means, strict=True):
            _copy_out(part, gradient.value.view(-1))


def _copy_in(part: Tensor, flat: Tensor) -> None:
    """Copy ``flat`` into the rows of ``part``, and fill the end with zeros."""
    num_whole, rest = divmod(flat.numel(), part.shape[1])
    part[:num_whole].copy_(flat[: num_whole * part.shape[1]].view(num_whole, part.shape[1]))
    if num_whole < len(part):
        part[num_whole:].zero_()
        if rest:
            part[num_whole, :rest].copy_(flat[num_whole * part.shape[1] :])


def _copy_out(part: Tensor, flat: Tensor) -> None:
    """Copy the rows of ``part`` into ``flat``, without the end that :func:`_copy_in` has filled."""
    num_whole, rest = divmod(flat.numel(), part.shape[1])
    flat[: num_whole * part.shape[1]].view(num_whole, part.shape[1]).copy_(part[:num_whole])
    if rest:
        flat[num_whole * part.shape[1] :].copy_(part[num_whole, :rest])
