"""Send gradients as 8-bit integers with one scale per block."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.techniques.compression.blockwise import Blockwise

__all__ = ["Int8"]


class Int8(Blockwise):
    """Round blocks of gradients to 8-bit integers, in linear steps of 1/127 of the block's largest magnitude.

    The arguments are those of :class:`~lightning_dist.techniques.compression.blockwise.Blockwise`.
    """

    dtype: ClassVar[torch.dtype] = torch.int8
    largest: ClassVar[float] = 127.0

    def round(self, scaled: Tensor) -> Tensor:
        """Return ``scaled`` rounded to integers."""
        return scaled.round_().clamp_(-127, 127).to(torch.int8)
