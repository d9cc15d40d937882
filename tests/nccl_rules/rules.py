"""Refuse the tensors and reductions that NCCL refuses, with the errors that torch raises for NCCL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.memory import device

__all__ = ["Kind", "RuleError", "check_tensors", "kind_of"]


class RuleError(RuntimeError):
    """Report code with which NCCL would hang, mix up data or race."""


Kind = dist.ReduceOp.RedOpType
_KINDS = (Kind.SUM, Kind.AVG, Kind.PRODUCT, Kind.MIN, Kind.MAX, Kind.PREMUL_SUM)
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_DTYPES = {
    torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, *_FLOAT8,
}  # fmt: skip


def check_tensors(tensors: Iterable[Tensor], is_reduced: bool = False) -> None:
    """Check that NCCL accepts the tensors of an operation.

    Args:
        tensors: The inputs and outputs of the operation.
        is_reduced: Whether the operation reduces them.

    Raises:
        RuntimeError, ValueError, TypeError: As torch raises them for NCCL.
    """
    for tensor in tensors:
        if tensor.device.type != device().type:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            raise RuleError(f"an operation was given a tensor of the class {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if is_reduced and tensor.dtype in _FLOAT8:
            raise TypeError("Unsupported Float8 type for NCCL reduction")
        is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        if not tensor.is_contiguous() and not is_channels_last:
            raise ValueError("Tensors must be contiguous")


def kind_of(op: Any, tensor: Tensor) -> Kind:
    """Return the kind of a reduction of ``tensor``.

    Raises:
        ValueError, TypeError: As torch raises them for NCCL, if it does not have the reduction.
    """
    found = next((kind for kind in Kind.__members__.values() if op == kind), None)
    if found is None and isinstance(op, dist.ReduceOp):  # A sum of scaled tensors, which equals no plain kind.
        found = op.__getstate__()[0]
    if found not in _KINDS:
        raise ValueError(f"Cannot use ReduceOp.{getattr(found, 'name', op)} with NCCL")
    if tensor.dtype == torch.bool and found == Kind.AVG:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if found == Kind.PREMUL_SUM and tensor.dtype not in (torch.half, torch.float, torch.double):
        raise TypeError("PreMulSum Data type must be half, float, or double")
    return found
