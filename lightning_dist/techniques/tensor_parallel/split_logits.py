"""Represent logits that are split along the vocabulary by a tensor subclass that behaves like the whole logits.

``F.cross_entropy`` works on each rank's part, so that no rank ever has the whole logits in memory (Shoeybi et al.,
2019, section 3, and Megatron-LM's vocabulary-parallel cross entropy). Views, casts, and scaling by a number work on
each rank's part as well. For any other function the ranks gather the whole logits, so that all ranks must call it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dist._compat import assert_on_device, simulated_backend, without_memory
from lightning_dist.mesh import autograd_collectives
from lightning_dist.mesh.split_tensor import CASTS, RESHAPES, TRANSPOSES, SplitTensor, functions_of
from lightning_dist.mesh.traffic import count_all_reduce

__all__ = ["SplitLogits", "works_on_parts"]


_ELEMENTWISE = functions_of("mul __mul__ __rmul__ div __truediv__ tanh neg __neg__")


class SplitLogits(SplitTensor):
    """Represent a tensor of which this rank has a part along one dimension.

    Args:
        local: This rank's part, a plain tensor.
        group: Process group of the ranks; their parts are equally large, and in the order of the ranks.
        dim: The dimension along which the parts are concatenated to the whole tensor; the last by default.
    """

    group: dist.ProcessGroup
    split_dim: int
    what = "logits that are split over tp"
    remedy = "set loss_parallel=False"

    @staticmethod
    def __new__(cls, local: Tensor, group: dist.ProcessGroup, dim: int = -1) -> SplitLogits:
        """Wrap ``local``."""
        shape = list(local.shape)
        shape[dim] *= group.size()
        wrapper = without_memory(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)
        wrapper.local, wrapper.group, wrapper.split_dim = local, group, dim % local.ndim
        return wrapper

    def __init__(self, local: Tensor, group: dist.ProcessGroup, dim: int = -1) -> None:
        """Do nothing, because ``__new__`` has already set all attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text without the values, because showing them would be a collective."""
        part = f"{self.group.rank() + 1} of {self.group.size()} parts of the vocabulary"
        return f"SplitLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {part})"

    def gathered(self) -> Tensor:
        """Gather the whole tensor on every rank. This is a collective over the group."""
        return autograd_collectives.gather(self.local, self.group, self.split_dim)

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks of the group."""
        return dist.get_process_group_ranks(self.group)

    def detached(self) -> SplitLogits:
        """Return the tensor without its history."""
        return SplitLogits(self.local.detach(), self.group, self.split_dim)


def works_on_parts(func: Any, logits: Tensor, args: Any, kwargs: Any) -> bool:
    """Return whether a function of split logits can probably work on each rank's part; some cases show only in a run.

    Args:
        func: The torch function.
        logits: The logits among its arguments.
        args: All positional arguments of the function, including the logits.
        kwargs: All keyword arguments of the function.
    """
    if func is functional.cross_entropy:
        target = args[1] if len(args) > 1 else kwargs.get("target")
        is_plain = not kwargs.get("label_smoothing") and kwargs.get("weight") is None and len(args) < 3
        return is_plain and isinstance(target, Tensor) and not target.is_floating_point()
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(part, Tensor) for part in index)
    if func in _ELEMENTWISE:
        return all(not isinstance(other, Tensor) or other is logits or other.ndim == 0 for other in args)
    return any(func in known for known, _ in SplitLogits.on_parts)


def _reshaped(func: Any, logits: SplitLogits, args: Any, kwargs: Any) -> SplitLogits | None:
    if logits.split_dim != logits.ndim - 1:
        return None
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    return SplitLogits(logits.local.reshape(*shape[:-1], logits.local.size(-1)), logits.group)


def _transposed(func: Any, logits: SplitLogits, args: Any, kwargs: Any) -> SplitLogits:
    probe = torch.empty([3 if dim == logits.split_dim else 2 for dim in range(logits.ndim)], device="meta")
    dim = list(func(probe, *args, **kwargs).shape).index(3)
    return SplitLogits(func(logits.local, *args, **kwargs), logits.group, dim)


def _cast(func: Any, logits: SplitLogits, args: Any, kwargs: Any) -> SplitLogits | None:
    if args and isinstance(args[0], SplitLogits):
        args = (args[0].local, *args[1:])
    result = func(logits.local, *args, **kwargs)
    if result.device != logits.local.device:  # The group may not be able to communicate on the other device.
        return None
    return SplitLogits(result, logits.group, logits.split_dim)


def _scaled(func: Any, logits: SplitLogits, args: Any, kwargs: Any) -> SplitLogits | None:
    def is_scalar(value: Any) -> bool:
        return isinstance(value, int | float) or (
            isinstance(value, Tensor) and value.ndim == 0 and not isinstance(value, SplitLogits)
        )

    if kwargs or not all(map(is_scalar, args)):
        return None
    # Each rank computes a part of the gradient of the scale, so the gradient is summed over the ranks.
    args = [
        autograd_collectives.copy_to(value, logits.group)
        if isinstance(value, Tensor) and value.requires_grad
        else value
        for value in args
    ]
    return SplitLogits(func(logits.local, *args), logits.group, logits.split_dim)


def _selected(func: Any, logits: SplitLogits, args: Any, kwargs: Any) -> SplitLogits | None:
    """Select samples or positions, or return None if the index does not keep the whole dimension of the vocabulary."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(isinstance(part, Tensor) for part in index) or logits.split_dim != logits.ndim - 1:
        return None
    num_taken = sum(part is not None and part is not Ellipsis for part in index)
    takes_last = num_taken == logits.ndim or (Ellipsis in index and index[-1] is not Ellipsis)
    if takes_last and index[-1] != slice(None):
        return None
    return SplitLogits(func(logits.local, *args), logits.group)


def _cross_entropy(func: Any, logits: SplitLogits, args: Any, kwargs: Any) -> Tensor | None:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target = given.pop("target", None)
    ignore_index, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
    class_dim = 0 if logits.ndim == 1 else 1
    smoothing = given.pop("label_smoothing", 0.0)
    is_plain = all(value is None for value in given.values()) and not smoothing
    is_plain = is_plain and reduction in ("none", "sum", "mean")  # torch's own function reports any other.
    has_classes = isinstance(target, Tensor) and not isinstance(target, SplitLogits) and not target.is_floating_point()
    if not is_plain or not has_classes or logits.split_dim != class_dim:
        return None
    is_class = ((target >= 0) & (target < logits.size(class_dim))) | (target == ignore_index)
    if target.device.type != "cpu":
        assert_on_device(is_class.all())
    elif simulated_backend() is None and not is_class.all():
        wrong = int(target[~is_class][0])
        raise IndexError(f"Target {wrong} is out of bounds: there are {logits.size(class_dim)} classes.")
    local = logits.local.movedim(class_dim, -1)
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()
    losses: Tensor = _CrossEntropy.apply(local, target, logits.group, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    mean: Tensor = losses.sum() / (target != ignore_index).sum()
    return mean


class _CrossEntropy(torch.autograd.Function):
    """Compute the cross entropy of each target. The ranks exchange only tensors of the targets' size."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, target: Tensor, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
        dtype = torch.promote_types(local.dtype, torch.float32)
        largest = local.amax(-1).to(dtype)
        count_all_reduce(largest, group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        own = target - group.rank() * local.size(-1)
        is_own = (own >= 0) & (own < local.size(-1)) & (target != ignore_index)
        own = own.masked_fill(~is_own, 0).unsqueeze(-1)
        shifted = local.to(dtype, copy=True).sub_(largest.unsqueeze(-1))
        of_target = shifted.gather(-1, own).squeeze(-1).masked_fill(~is_own, 0.0)
        sums = torch.stack((shifted.exp_().sum(-1), of_target))
        count_all_reduce(sums, group)
        dist.all_reduce(sums, group=group)
        total, of_target = sums.unbind()
        log_total = total.log()
        is_ignored = target == ignore_index
        ctx.save_for_backward(local, largest + log_total, own, is_own, is_ignored)
        ctx.group = group
        return (log_total - of_target).masked_fill(is_ignored, 0.0).to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        local, log_sum, own, is_own, is_ignored = ctx.saved_tensors
        scale = gradient.masked_fill(is_ignored, 0.0).to(log_sum.dtype)
        if torch.is_grad_enabled():  # Under create_graph=True the gradient must be differentiable itself.
            scale = autograd_collectives.copy_to(scale, ctx.group)
            logits = local.to(log_sum.dtype)
            # The value of total is 1, but it has a gradient.
            total = autograd_collectives.sum_from((logits - log_sum.unsqueeze(-1)).exp().sum(-1), ctx.group)
            log_total = autograd_collectives.copy_to(total.log(), ctx.group) + log_sum
            result = (logits - log_total.unsqueeze(-1)).exp() * scale.unsqueeze(-1)
            return result.scatter_add(-1, own, -(scale * is_own).unsqueeze(-1)).to(local.dtype), None, None, None
        result = local.to(log_sum.dtype, copy=True).sub_(log_sum.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1))
        result.scatter_add_(-1, own, -(scale * is_own).unsqueeze(-1))
        return result.to(local.dtype), None, None, None


SplitLogits.on_parts = (
    ({functional.cross_entropy}, _cross_entropy),
    (RESHAPES, _reshaped),
    (TRANSPOSES, _transposed),
    (CASTS, _cast),
    (_ELEMENTWISE, _scaled),
    ({Tensor.__getitem__}, _selected),
)
