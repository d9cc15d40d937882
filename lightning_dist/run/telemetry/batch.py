"""Count the samples and tokens of a batch of any structure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BatchSize(NamedTuple):
    """Hold the numbers of samples and tokens in the batch of one process; a number is 0 if it is not known."""

    samples: int
    tokens: int


def batch_size(batch: Any) -> BatchSize:
    """Count the samples and tokens of a batch.

    The number of samples is the size of dimension 0 of the first tensor. The number of tokens is the number of elements
    of the first 2-dimensional integer tensor.

    Args:
        batch: A tensor, or tensors nested in mappings, tuples, lists and dataclasses, which are searched in their
            order.

    Returns:
        The counts of this process's batch. A batch without tensors counts as ``BatchSize(0, 0)``.
    """
    samples: int | None = None
    for tensor in _tensors(batch):
        if samples is None:
            samples = tensor.shape[0] if tensor.dim() else 1
        if tensor.dim() == 2 and _is_integer(tensor.dtype):
            return BatchSize(samples, tensor.numel())
    return BatchSize(samples or 0, 0)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch, depth first."""
    children: Iterable[Any]
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, (tuple, list)):
        children = value
    elif is_dataclass(value) and not isinstance(value, type):
        children = (getattr(value, field.name) for field in fields(value))
    else:
        return
    for child in children:
        yield from _tensors(child)
