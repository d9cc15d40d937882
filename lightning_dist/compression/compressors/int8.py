"""Send gradients as 8-bit integers with one scale per block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dist.compression.two_shot import TwoShot

__all__ = ["Int8"]


class Int8(TwoShot):
    """Quantise blocks of gradients to 8-bit integers, each block by its largest magnitude.

    Blockwise quantisation follows Dettmers et al. (2022), with linear steps of 1/127 of the largest magnitude.

    Args:
        block_size: Number of consecutive elements that share a scale, which takes 4 bytes; a multiple of 4, so that the
            scales, which are sent behind the integers, are aligned.
        kwargs: Arguments of :class:`~lightning_dist.compression.Compressor`.

    Raises:
        ValueError: If an argument is not valid.
    """

    def __init__(self, block_size: int = 256, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if block_size < 4 or block_size % 4:
            raise ValueError(f"block_size={block_size} must be a positive multiple of 4, such as 256.")
        self.block_size = block_size

    def encode(self, rows: Tensor) -> Tensor:
        """Return the integers of each row, followed by the scales of its blocks in float32."""
        blocks = rows.view(len(rows), -1, self.block_size)
        scales = (blocks.abs().amax(dim=2) / 127).to(torch.float32)  # A vector norm takes several times as long.
        steps = torch.where(scales == 0, torch.ones_like(scales), scales).to(rows.dtype)
        integers = (blocks / steps.unsqueeze(2)).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([integers.view(len(rows), -1).view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers that :meth:`encode` has encoded."""
        num_blocks = rows.shape[1] // (self.block_size + 4)
        integers, scales = torch.split(rows, [num_blocks * self.block_size, num_blocks * 4], dim=1)
        blocks = integers.view(torch.int8).view(len(rows), num_blocks, self.block_size).to(dtype)
        steps = scales.contiguous().view(torch.float32).to(dtype)
        return torch.mul(blocks, steps.unsqueeze(2)).view(len(rows), -1)
