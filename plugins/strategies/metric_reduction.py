"""Reduce logged metrics over ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lightning_dist._compat import backend_of

__all__ = ["reduce_metric"]


def reduce_metric(value: Tensor, group: dist.ProcessGroup | None, reduce_op: dist.ReduceOp | str | None) -> Tensor:
    """Reduce ``value`` in place over ``group``, and return it. This is a collective over ``group``.

    The result is that of Lightning's own strategies, which put a barrier before each reduction: with NCCL, the host
    would wait for the device at each metric that is logged with ``sync_dist=True``. A mean of integers is rounded
    towards zero.

    Args:
        value: This rank's value, with the same shape and dtype on all ranks.
        group: Process group of the ranks; None: all processes.
        reduce_op: The reduction; None: the sum.

    Raises:
        ValueError: If there is no reduction of this name.
    """
    if not dist.is_initialized():
        return value
    divides = False
    if isinstance(reduce_op, str):
        name = reduce_op.upper().replace("MEAN", "AVG")
        divides = name == "AVG" and _backend_of(value, group) == "gloo"  # gloo has no AVG.
        op = getattr(dist.ReduceOp, "SUM" if divides else name, None)
        if op is None:
            raise ValueError(f"reduce_op={reduce_op!r} must be 'mean', 'sum', 'min', 'max', 'product' or a ReduceOp.")
    else:
        op = dist.ReduceOp.SUM if reduce_op is None else reduce_op
    dist.all_reduce(value, op, group)
    if not divides:
        return value
    num_ranks = dist.get_world_size(group)
    return value.div_(num_ranks) if value.is_floating_point() else value.copy_(value / num_ranks)


def _backend_of(value: Tensor, group: dist.ProcessGroup | None) -> str:
    """Return the backend that reduces ``value``; a group may have one for each type of device."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get(value.device.type, backend_of(group))
