"""Represent values of which each rank has its own tokens as a tensor that behaves like the whole one.

The logits of a long sequence are the largest tensor of a step. After the last block, a head and norms therefore compute
on each rank's tokens (see :mod:`.after_blocks`), and ``F.cross_entropy`` works on them. Views that keep the tokens
apart, slices along the sequence, casts and scaling by a number work on them as well.

The gradients of this rank's tokens are those inside of blocks (see :mod:`.tokens`): the loss is the sum over the ranks,
whose gradient is multiplied by their number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dist._compat import without_memory
from lightning_dist.mesh.split_tensor import CASTS, RESHAPES, TRANSPOSES, SplitTensor, functions_of
from lightning_dist.techniques.context_parallel.tokens import Tokens

__all__ = ["SplitTokens"]

_ELEMENTWISE = functions_of("mul __mul__ __rmul__ div __truediv__ tanh neg __neg__")


class SplitTokens(SplitTensor):
    """Represent a tensor of which this rank has its own tokens.

    Args:
        local: This rank's tokens, a plain tensor.
        tokens: Description of which tokens they are.
        dim: The dimension of the tokens in ``local``.
        kept: The range of tokens of the sequence that the whole tensor has; None: all.
        is_flat: Whether the dimensions up to ``dim`` are one dimension of the whole tensor, as after ``flatten(0, 1)``.
    """

    tokens: Tokens
    token_dim: int
    kept: tuple[int, int]
    is_flat: bool
    what = "a tensor that is split over cp"
    remedy = "use cp_size=1 (in an evaluation: split_evaluations=False)"

    @staticmethod
    def __new__(
        cls, local: Tensor, tokens: Tokens, dim: int, kept: tuple[int, int] | None = None, is_flat: bool = False
    ) -> SplitTokens:
        """Wrap ``local``."""
        dim %= local.ndim
        start, stop = kept or (0, tokens.length)
        shape = [*local.shape]
        shape[dim] = stop - start
        if is_flat:
            shape = [math.prod(shape[: dim + 1]), *shape[dim + 1 :]]
        wrapper = without_memory(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)
        wrapper.local, wrapper.tokens, wrapper.token_dim = local, tokens, dim
        wrapper.kept, wrapper.is_flat = (start, stop), is_flat
        return wrapper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because ``__new__`` has already set all attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text without the values, because showing them would be a collective."""
        return f"SplitTokens(shape={tuple(self.shape)}, dtype={self.dtype}, {self.tokens.own} tokens on each rank)"

    def whole(self, function: str) -> Tensor:
        """Gather the whole tensor for ``function``, when all ranks have come to it."""
        if isinstance(self.local, SplitTensor):  # These are logits that have not been computed.
            return self.with_local(self.local.whole(function)).whole(function)
        return super().whole(function)

    def gathered(self) -> Tensor:
        """Gather the tokens of all ranks. This is a collective over ``cp``."""
        start, stop = self.kept
        whole = self.tokens.gather(self.local, self.token_dim - self.local.ndim).narrow(
            self.token_dim, start, stop - start
        )
        return whole.flatten(0, self.token_dim) if self.is_flat else whole

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks that have the tokens."""
        return dist.get_process_group_ranks(self.tokens.group)

    def with_local(self, local: Tensor) -> SplitTokens:
        """Return a tensor with other values or another dtype."""
        return SplitTokens(local, self.tokens, self.token_dim, self.kept, self.is_flat)

    def detached(self) -> SplitTokens:
        """Return the tensor without its history."""
        return self.with_local(self.local.detach())


def _reshaped(func: Any, value: SplitTokens, args: Any, kwargs: Any) -> SplitTokens | None:
    """Merge the dimensions up to the tokens, or separate them again."""
    if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
        return None
    local, dim = value.local, value.token_dim
    shape = tuple(func(torch.empty(value.shape, device="meta"), *args, **kwargs).shape)
    start, stop = value.kept
    apart = (*local.shape[:dim], stop - start, *local.shape[dim + 1 :])
    merged = (math.prod(apart[: dim + 1]), *apart[dim + 1 :])
    if shape == apart:
        return SplitTokens(local, value.tokens, dim, value.kept)
    return SplitTokens(local, value.tokens, dim, value.kept, is_flat=True) if shape == merged else None


def _transposed(func: Any, value: SplitTokens, args: Any, kwargs: Any) -> SplitTokens | None:
    if value.is_flat:
        return None
    probe = torch.empty([3 if dim == value.token_dim else 2 for dim in range(value.ndim)], device="meta")
    dim = list(func(probe, *args, **kwargs).shape).index(3)
    return SplitTokens(func(value.local, *args, **kwargs), value.tokens, dim, value.kept)


def _cast(func: Any, value: SplitTokens, args: Any, kwargs: Any) -> SplitTokens | None:
    if args and isinstance(args[0], SplitTokens):
        args = (args[0].local, *args[1:])
    result = func(value.local, *args, **kwargs)
    return value.with_local(result) if result.device == value.local.device else None


def _scaled(func: Any, value: SplitTokens, args: Any, kwargs: Any) -> SplitTokens | None:
    if kwargs or not all(isinstance(arg, int | float) for arg in args):
        return None
    return value.with_local(func(value.local, *args))


def _selected(func: Any, value: SplitTokens, args: Any, kwargs: Any) -> SplitTokens | None:
    """Select a range of tokens, and slices of other dimensions."""
    index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
    if value.is_flat or not all(part is Ellipsis or isinstance(part, slice) for part in index):
        return None
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index[place : place + 1] = [slice(None)] * (value.ndim - len(index) + 1)
    index += [slice(None)] * (value.ndim - len(index))
    start, stop, step = index[value.token_dim].indices(value.size(value.token_dim))
    if step != 1 or stop <= start:
        return None
    index[value.token_dim] = slice(None)
    first = value.kept[0]
    return SplitTokens(value.local[tuple(index)], value.tokens, value.token_dim, (first + start, first + stop))


def _cross_entropy(func: Any, logits: SplitTokens, args: Any, kwargs: Any) -> Tensor | None:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, reduction = given.pop("target", None), given.pop("reduction", "mean")
    weight, ignore_index = given.get("weight"), given.get("ignore_index", -100)
    is_plain = given.get("size_average") is None and given.get("reduce") is None
    if not is_plain or reduction not in ("none", "sum", "mean") or not isinstance(target, Tensor):
        return None
    tokens, (start, stop), dim = logits.tokens, logits.kept, logits.token_dim
    is_class_next = logits.local.ndim == dim + 2  # The classes follow the tokens, as in (tokens, classes).
    has_class_first = not logits.is_flat and dim >= 2  # This is (samples, classes, ..., tokens, ...).
    if target.is_floating_point() or not (has_class_first or (is_class_next and (logits.is_flat or dim == 0))):
        return None
    if list(target.shape) != [size for index, size in enumerate(logits.shape) if index != 1]:
        return None
    if logits.is_flat:
        target = target.view(*logits.local.shape[:dim], stop - start)
    token_dim = (dim - 1 if has_class_first else dim) - target.ndim
    # Tokens outside of the kept range have no target.
    padding = [0, 0] * (-token_dim - 1) + [start, tokens.length - stop]
    own = tokens.part(functional.pad(target, padding, value=ignore_index), token_dim, ignore_index)
    local = logits.local.flatten(0, dim) if logits.is_flat else logits.local
    own_reduction = "none" if reduction == "none" else "sum"
    losses = func(local, own.flatten(0, dim) if logits.is_flat else own, reduction=own_reduction, **given)
    if reduction == "none":
        whole = tokens.gather(losses.view(own.shape), token_dim).narrow(token_dim, start, stop - start)
        return whole.flatten() if logits.is_flat else whole
    total = tokens.sum(losses)
    if reduction == "sum":
        return total
    is_target = target != ignore_index
    mean: Tensor = total / (is_target.sum() if weight is None else weight[target[is_target]].sum())
    return mean


SplitTokens.on_parts = (
    ({functional.cross_entropy}, _cross_entropy),
    (RESHAPES, _reshaped),
    (TRANSPOSES, _transposed),
    (CASTS, _cast),
    (_ELEMENTWISE, _scaled),
    ({Tensor.__getitem__}, _selected),
)
