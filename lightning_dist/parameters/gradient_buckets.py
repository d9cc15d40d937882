"""Divide parameters into buckets, whose gradients are reduced as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_dist._compat import local_of

__all__ = ["as_dtensor", "in_buckets"]

_BUCKET_BYTES = 25 * 2**20
"""The largest size of a bucket, as in DistributedDataParallel."""

_FIRST_BUCKET_BYTES = 2**20
"""The size of the bucket whose gradients come first, which is small so that communication begins soon."""


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> Tensor:
    """Return a DTensor of the shape of ``like`` with the local tensor ``local``."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def in_buckets(params: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> Iterator[list[nn.Parameter]]:
    """Yield lists of parameters of one dtype, each about as large as a bucket, in the order of ``params``.

    Integer parameters, such as the weights of a quantized model, have no gradients and are left out.

    Args:
        params: The parameters, in the order in which a backward computes their gradients.
        reduce_dtype: The dtype that gradients are reduced in; None: that of each parameter.
    """
    params = [param for param in params if param.is_floating_point() or param.is_complex()]
    limit, num_bytes, bucket = _FIRST_BUCKET_BYTES, 0, list[nn.Parameter]()
    for param in params:
        size = local_of(param).numel() * (reduce_dtype or param.dtype).itemsize
        if bucket and (param.dtype != bucket[0].dtype or num_bytes + size > limit):
            yield bucket
            limit, num_bytes, bucket = _BUCKET_BYTES, 0, []
        bucket.append(param)
        num_bytes += size
    if bucket:
        yield bucket
