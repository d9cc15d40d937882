"""Let FSDP2 shard a parameter over thousands of ranks without making a tensor for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OneEmptyShard"]


class OneEmptyShard(TorchFunctionMode):
    """Make all empty chunks of a tensor one tensor, while FSDP2 shards parameters in this context.

    FSDP2 cuts a parameter by ``torch.chunk``, and then makes a new empty tensor for each rank for which there is no
    row. With 16,384 ranks these are nearly all ranks of nearly all parameters, and take milliseconds each time. In
    this context, ``torch.chunk`` returns as many chunks as it was asked for.

    Replaced by: an FSDP2 that computes the size of its own shard only.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and lengthen the result of ``torch.chunk``."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.chunk:
            return result
        num_missing = args[1] - len(result)
        return (*result, *[result[0].new_empty(0)] * num_missing) if num_missing > 0 else result
