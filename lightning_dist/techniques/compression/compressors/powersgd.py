"""Send low-rank approximations of the gradients of matrices."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dist.techniques.compression.compressor import Compressor, Gradient, wide_dtype
from lightning_dist.techniques.compression.wire import Wire

__all__ = ["PowerSGD"]


class PowerSGD(Compressor):
    """Approximate the mean gradient of each matrix by one of low rank (PowerSGD, Vogels et al., 2019, algorithm 1).

    A step of power iteration is computed on the matrices of all replicas together: of a gradient with ``n`` rows and
    ``m`` columns, ``rank * (n + m)`` numbers are summed over the replicas. A tensor with more dimensions is a matrix
    whose rows are its first dimension.

    Args:
        rank: Rank of the approximations.
        min_compression_rate: Smallest ratio of a gradient's size to the size of what is sent for it; other gradients
            are not compressed.
        warm_start: Whether a power iteration goes on from the result of the last step, and does not begin with random
            numbers.
        seed: Seed of these random numbers.
        kwargs: Arguments of :class:`~lightning_dist.techniques.compression.Compressor`.

    Raises:
        ValueError: If an argument is not valid.
    """

    def __init__(
        self, rank: int = 4, min_compression_rate: float = 2.0, warm_start: bool = True, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if rank < 1:
            raise ValueError(f"rank={rank} must be at least 1: it is the rank of the matrices that are sent.")
        if min_compression_rate < 1:
            raise ValueError(
                f"min_compression_rate={min_compression_rate} must be at least 1: below it, more would be sent than the"
                " gradient itself."
            )
        self.rank = rank
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.seed = seed

    def compresses(self, name: str, shape: torch.Size) -> bool:
        """Return whether an approximation of the gradient of shape ``shape`` is small enough."""
        if not super().compresses(name, shape):
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        is_smaller = shape.numel() >= self.min_compression_rate * self.rank * (rows + columns)
        return is_smaller and self.rank <= min(rows, columns)

    def _requirement(self) -> str:
        return (
            f"{super()._requirement()}, and of which factors of rank={self.rank} have fewer elements by"
            f" min_compression_rate={self.min_compression_rate},"
        )

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check that the rank is not above the rank of every matrix.

        Raises:
            ValueError: If it is, or if no parameter would be compressed.
        """
        matrices = {name: shape for name, shape in shapes.items() if super(PowerSGD, self).compresses(name, shape)}
        sides = {name: min(shape[0], shape.numel() // shape[0]) for name, shape in matrices.items()}
        if sides and self.rank > max(sides.values()):
            name = max(sides, key=lambda name: sides[name])
            raise ValueError(
                f"rank={self.rank} is above the rank of every matrix of this model: the largest is {name!r}, of shape"
                f" {tuple(matrices[name])}. Use a rank much smaller than {sides[name]}, such as 4."
            )
        super().check(shapes)

    def average(self, gradients: Sequence[Gradient], wire: Wire) -> None:
        """Replace the values of ``gradients`` by low-rank approximations of their means. This is a collective."""
        inputs = self.add_residuals(gradients)
        dtype = wide_dtype(inputs[0])
        matrices = [value.to(dtype).view(len(value), -1) for value in inputs]
        first_factors, flat = self._factors([len(matrix) for matrix in matrices], matrices[0])
        for gradient, matrix, factor in zip(gradients, matrices, first_factors, strict=True):
            factor.t().copy_(matrix @ self._start(gradient, matrix).t())
        wire.sum(flat)
        bases = [torch.linalg.qr(factor.t()).Q for factor in first_factors]
        second_factors, flat = self._factors([matrix.shape[1] for matrix in matrices], matrices[0])
        for matrix, basis, factor in zip(matrices, bases, second_factors, strict=True):
            torch.mm(basis.t(), matrix, out=factor)
            if self.error_feedback:
                matrix.addmm_(basis, factor, alpha=-1)
        wire.sum(flat)
        flat.div_(wire.size)
        for gradient, matrix, basis, factor in zip(gradients, matrices, bases, second_factors, strict=True):
            if gradient.value.dtype == dtype:
                torch.mm(basis, factor, out=gradient.value.view_as(matrix))
            else:
                gradient.value.copy_((basis @ factor).view_as(gradient.value))
            if self.warm_start:
                gradient.state["q"] = factor.clone()

    def _factors(self, lengths: Sequence[int], like: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return empty matrices of shapes ``(rank, length)``, and the flat tensor whose views they are.

        Products with the transposes of such matrices take half as long as with matrices of shape ``(length, rank)``.
        """
        flat = like.new_empty(sum(lengths) * self.rank)
        parts = torch.split(flat, [length * self.rank for length in lengths])
        return [part.view(self.rank, -1) for part in parts], flat

    def _start(self, gradient: Gradient, matrix: Tensor) -> Tensor:
        """Return the matrix that begins the power iteration, of shape ``(rank, columns)``."""
        before = gradient.state.get("q")
        if before is not None and before.shape == (self.rank, matrix.shape[1]):
            if before.device.type != "cpu":
                # A resumed run has loaded it in another stream, which must not use its memory again too early.
                before.record_stream(torch.get_device_module(before.device.type).current_stream())
            # Products of two small gradients could underflow. The scale does not matter for the result.
            return torch.div(before, before.norm().clamp_min(torch.finfo(before.dtype).tiny))
        steps = gradient.num_reductions if not self.warm_start else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {steps} {gradient.name}".encode()))
        start = torch.randn(self.rank, matrix.shape[1], generator=generator, dtype=matrix.dtype)
        return start.to(matrix.device)

    def shard_state_shape(self, key: str, shape: torch.Size) -> torch.Size:
        """Return the shape of the second factor of a gradient of the shape ``shape``."""
        return torch.Size([self.rank, shape[1:].numel()])

    def describe(self) -> dict[str, Any]:
        """Return the arguments that matter for the results."""
        return {"rank": self.rank, **super().describe()}
