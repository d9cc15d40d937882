"""Send 8-bit numbers with one scale per block."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dist.techniques.compression.two_shot import TwoShot

__all__ = ["Blockwise"]


class Blockwise(TwoShot):
    """Scale blocks of gradients to the range of an 8-bit format, and round them to it.

    Each block is scaled by its largest magnitude (block-wise quantisation, Dettmers et al., 2022).

    Args:
        block_size: Number of consecutive elements that share a scale, which takes 4 bytes; a multiple of 4, so that the
            scales, which are sent behind the numbers, are aligned.
        kwargs: Arguments of :class:`~lightning_dist.techniques.compression.Compressor`.

    Raises:
        ValueError: If an argument is not valid.
    """

    dtype: ClassVar[torch.dtype]
    """The 8-bit format."""

    largest: ClassVar[float]
    """The magnitude in this format to which the largest number of a block is scaled."""

    def __init__(self, block_size: int = 256, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if block_size < 4 or block_size % 4:
            raise ValueError(f"block_size={block_size} must be a positive multiple of 4, such as 256.")
        self.block_size = block_size

    @abstractmethod
    def round(self, scaled: Tensor) -> Tensor:
        """Return ``scaled``, whose magnitudes are at most ``largest``, in the 8-bit format; it may be changed."""

    def encode(self, rows: Tensor) -> Tensor:
        """Return the numbers of each row in the 8-bit format, followed by the scales of its blocks in float32."""
        blocks = rows.view(len(rows), -1, self.block_size)
        # A vector norm takes several times as long as abs().amax().
        scales = (blocks.abs().amax(dim=2) / self.largest).to(torch.float32)
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales).to(rows.dtype)
        numbers = self.round(blocks / divisors.unsqueeze(2))
        return torch.cat([numbers.view(len(rows), -1).view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers that :meth:`encode` has encoded."""
        num_blocks = rows.shape[1] // (self.block_size + 4)
        numbers, scales = torch.split(rows, [num_blocks * self.block_size, num_blocks * 4], dim=1)
        blocks = numbers.view(self.dtype).view(len(rows), num_blocks, self.block_size).to(dtype)
        factors = scales.contiguous().view(torch.float32).to(dtype)
        return torch.mul(blocks, factors.unsqueeze(2)).view(len(rows), -1)
