"""Make models compute in float64 even where they convert to float32 on purpose.

Norms, rotary embeddings, softmaxes and losses of ``transformers`` convert to float32, which is meant to raise the
precision of half-precision models. In a float64 run the conversion would round, and hide all errors below 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["float64_throughout"]


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Make conversions to float32 convert to float64 in this context."""
    with (
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(Tensor, "to", _converting(Tensor.to)),
        mock.patch.object(Tensor, "type", _converting(Tensor.type)),
        mock.patch.object(functional, "softmax", _converting(functional.softmax)),
        mock.patch.object(functional, "log_softmax", _converting(functional.log_softmax)),
        mock.patch.object(torch, "softmax", _converting(torch.softmax)),
    ):
        yield


def _converting(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})

    return call


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
