"""Send gradients in an 8-bit floating-point format with one scale per block."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.techniques.compression.blockwise import Blockwise

__all__ = ["FP8"]


class FP8(Blockwise):
    """Round blocks of gradients to float8 (E4M3, Micikevicius et al., 2022).

    The error of a number is at most 1/16 of the number itself down to 1/28,000 of its block's largest magnitude, where
    that of :class:`~lightning_dist.techniques.compression.Int8` is at most 1/254 of this magnitude. Float8 is better
    for blocks in which a few numbers are much larger than the others. The arguments are those of
    :class:`~lightning_dist.techniques.compression.blockwise.Blockwise`.
    """

    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = torch.finfo(torch.float8_e4m3fn).max

    def round(self, scaled: Tensor) -> Tensor:
        """Return ``scaled`` rounded to float8."""
        return scaled.to(torch.float8_e4m3fn)
