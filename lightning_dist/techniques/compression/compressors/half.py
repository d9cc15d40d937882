"""Send gradients in 16-bit floating-point formats."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dist.techniques.compression.two_shot import TwoShot

__all__ = ["BF16", "FP16"]


class BF16(TwoShot):
    """Send gradients in bfloat16, which has the range of float32 and 8 bits of precision.

    Args:
        error_feedback: As for :class:`~lightning_dist.techniques.compression.Compressor`. It is rarely needed, because
            the error of each gradient is at most 0.4% and unbiased.
        min_numel: As for :class:`~lightning_dist.techniques.compression.Compressor`.
        kwargs: Other arguments of :class:`~lightning_dist.techniques.compression.Compressor`.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def __init__(self, error_feedback: bool = False, min_numel: int = 1, **kwargs: Any) -> None:
        super().__init__(error_feedback=error_feedback, min_numel=min_numel, **kwargs)

    def encode(self, rows: Tensor) -> Tensor:
        """Return ``rows`` in the 16-bit format, as bytes."""
        return rows.to(self.dtype).view(torch.uint8)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers that :meth:`encode` has encoded."""
        return rows.view(self.dtype).to(dtype)


class FP16(BF16):
    """Send gradients in float16, which has 11 bits of precision.

    Gradients beyond 65504 become infinite, and the step is then skipped; those below 6e-8 become zero.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
