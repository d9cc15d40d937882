"""Describe a dataset such that two runs show whether they have trained on the same one."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import suppress
from typing import Any

import torch
import xxhash
from torch import Tensor

from lightning_dist.plugins._compat import FINGERPRINT

__all__ = ["describe_dataset"]

_NAMES_OF_DIGESTS = ("digest", "fingerprint", FINGERPRINT)
"""Attributes that hold a digest already."""
_NUM_SAMPLED = 4096


def describe_dataset(dataset: Any, datamodule: Any = None) -> dict[str, Any]:
    """Return the class, the number of samples and a digest of a dataset.

    The digest is an attribute ``digest`` or ``fingerprint`` of the data module or the dataset, if one of them has one.
    Otherwise, it is computed from the shapes and dtypes of the tensors and arrays that are attributes of the dataset,
    and of the datasets inside of it, and from 4,096 of their elements at equal distances. Samples are not fetched,
    since that may be slow or random; the digest is None if the dataset has no tensors.

    Args:
        dataset: The dataset of the training's loader.
        datamodule: The data module of the fit, if it has one.
    """
    num_samples = None
    with suppress(TypeError, NotImplementedError):  # Datasets of unknown length may have a __len__ that raises.
        num_samples = len(dataset) if isinstance(dataset, Sized) else None
    given = [str(value) for owner in (datamodule, dataset) for value in _given_digests(owner)]
    return {
        "dataset": type(dataset).__name__,
        "num_samples": num_samples,
        "digest": given[0] if given else _digest_of_tensors(dataset, num_samples),
    }


def _given_digests(owner: Any) -> Iterator[Any]:
    for name in _NAMES_OF_DIGESTS:
        value = getattr(owner, name, None)
        if isinstance(value, str | int):
            yield value


def _digest_of_tensors(dataset: Any, num_samples: int | None) -> str | None:
    digest = xxhash.xxh3_64(repr(num_samples).encode())
    found = False
    for tensor in _tensors(dataset):
        found = True
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        sampled = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].contiguous().cpu()
        digest.update(sampled.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else None


def _tensors(dataset: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors and arrays of a dataset and of the datasets inside of it, in the order of attributes."""
    for name, value in getattr(dataset, "__dict__", {}).items():
        for item in value if isinstance(value, list | tuple) and len(value) <= 64 else [value]:
            if isinstance(item, Tensor) and item.layout == torch.strided:
                yield item
            elif hasattr(item, "__array_interface__"):
                try:
                    yield torch.as_tensor(item)
                except (TypeError, ValueError):  # An array of objects, or of another dtype that torch does not have.
                    continue
            elif name in ("dataset", "datasets") and depth:
                yield from _tensors(item, depth - 1)
