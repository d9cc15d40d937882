"""Represent logits as a tensor whose values are computed only where they are used, and a few tokens at a time.

``F.cross_entropy`` computes the logits of a tile, their loss, and again both in the backward, so that neither the
logits nor their gradients are ever whole. Reshapes, slices along the tokens, casts and scaling by a number before the
loss are applied to each tile; ``argmax`` works tile by tile as well. Every other function computes the whole logits,
as without tiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_dist._compat import without_memory
from lightning_dist.mesh.split_tensor import CASTS, RESHAPES, TRANSPOSES, SplitTensor, functions_of
from lightning_dist.model.reruns import Begin
from lightning_dist.techniques.tiling.tiles import TOKENS, on_tile, ranges

__all__ = ["Head", "TiledLogits"]

_ELEMENTWISE = functions_of(
    "mul __mul__ __rmul__ div __truediv__ tanh neg __neg__ add __add__ __radd__ sub __sub__ clamp"
)


@dataclass(frozen=True)
class Head:
    """Describe how logits are computed.

    Args:
        hidden: The hidden states that the head is given, of shape ``(..., tokens, features)``.
        compute: Function that computes the logits of hidden states of some tokens.
        num_classes: Number of features of the logits.
        size: Number of tokens of a tile.
        begin: Function that lets the module that computes them have the same state in the backward.
        on_use: Function that is called when values are computed, with the name of the function that needs them, and
            whether it is computed tile by tile. It raises an error if the step has ended.
    """

    hidden: Tensor
    compute: Callable[[Tensor], Tensor]
    num_classes: int
    size: int
    begin: Begin
    on_use: Callable[[str, bool], None]

    def then(self, function: Callable[[Tensor], Tensor]) -> Head:
        """Return a head whose logits are those of this one after ``function``, which works element by element."""
        compute = self.compute
        return replace(self, compute=lambda tile: function(compute(tile)))

    def narrow(self, start: int, length: int) -> Head:
        """Return a head for the tokens from ``start`` on."""
        return replace(self, hidden=self.hidden.narrow(TOKENS, start, length))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the logits, ``(..., tokens, classes)``."""
        return (*self.hidden.shape[:-1], self.num_classes)

    def tiles(self) -> list[tuple[int, int]]:
        """Return the first token and the number of tokens of each tile."""
        return list(ranges(self.hidden.size(TOKENS), self.size))


class TiledLogits(SplitTensor):
    """Represent logits that have not been computed.

    Args:
        head: The function that computes the logits, and its input.
        dtype: The dtype of the logits.
        form: ``"plain"``: ``(..., tokens, classes)``; ``"flat"``: ``(rows, classes)``; ``"transposed"``: ``(...,
            classes, tokens)``.
        requires_grad: Whether a backward may need the logits.
    """

    head: Head
    form: str
    what = "logits that are computed tile by tile (tiled_loss)"
    remedy = "leave tiled_loss out"

    @staticmethod
    def __new__(cls, head: Head, dtype: torch.dtype, form: str = "plain", requires_grad: bool = True) -> TiledLogits:
        """Make a tensor without memory."""
        shape: tuple[int, ...] = head.shape
        if form == "flat":
            shape = (math.prod(shape[:-1]), shape[-1])
        elif form == "transposed":
            shape = (*shape[:-2], shape[-1], shape[-2])
        requires_grad = requires_grad and torch.is_grad_enabled()
        logits = without_memory(cls, shape, dtype=dtype, device=head.hidden.device, requires_grad=requires_grad)
        logits.head, logits.form = head, form
        return logits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because ``__new__`` has already set all attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text without the values, which would have to be computed."""
        return f"TiledLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {self.head.size} tokens at a time)"

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """Compute the whole logits."""
        return self.whole("a property")

    @property
    def history(self) -> Tensor:
        """Return the hidden states, so that hooks which look for a history compute no logits."""
        return self.head.hidden

    def gathered(self) -> Tensor:
        """Compute the whole logits."""
        return self.whole("other code")

    def whole(self, function: str) -> Tensor:
        """Compute the whole logits for ``function``, which does not work tile by tile."""
        self.head.on_use(function, False)
        logits = self.head.compute(self.head.hidden)
        if self.form == "flat":
            return logits.flatten(0, -2)
        return logits.transpose(-2, -1) if self.form == "transposed" else logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Register on the hidden states the hooks by which FSDP2 notices a backward; run other functions as usual."""
        is_hook = func is Tensor.register_hook and isinstance(args[0], cls)
        if is_hook and getattr(args[1], "__module__", "").startswith("torch.distributed."):
            return args[0].head.hidden.register_hook(args[1])
        return super().__torch_function__(func, types, args, kwargs)

    def changed(self, function: Callable[[Tensor], Tensor]) -> TiledLogits:
        """Return logits to which ``function`` is applied, element by element."""
        with torch.no_grad():
            dtype = function(torch.zeros(self.head.num_classes, dtype=self.dtype, device=self.device)).dtype
        return TiledLogits(self.head.then(function), dtype, self.form, self.requires_grad)

    def detached(self) -> TiledLogits:
        """Return the logits without their history."""
        return TiledLogits(
            replace(self.head, hidden=self.head.hidden.detach()).then(torch.detach), self.dtype, self.form, False
        )


def _reshaped(func: Any, value: TiledLogits, args: Any, kwargs: Any) -> TiledLogits | None:
    """Merge all dimensions before the classes, or separate them again."""
    if value.form == "transposed":
        return None
    shape = tuple(func(torch.empty(value.shape, device="meta"), *args, **kwargs).shape)
    if shape == value.head.shape:
        return TiledLogits(value.head, value.dtype, requires_grad=value.requires_grad)
    flat = TiledLogits(value.head, value.dtype, "flat", value.requires_grad)
    return flat if shape == (math.prod(shape[:-1]), shape[-1]) else None


def _transposed(func: Any, value: TiledLogits, args: Any, kwargs: Any) -> TiledLogits | None:
    if value.form == "flat":
        return None
    sizes = list(range(2, 2 + value.ndim))
    found = list(func(torch.empty(sizes, device="meta"), *args, **kwargs).shape)
    if found == sizes:
        return value
    if found != [*sizes[:-2], sizes[-1], sizes[-2]]:
        return None
    form = "plain" if value.form == "transposed" else "transposed"
    return TiledLogits(value.head, value.dtype, form, value.requires_grad)


def _cast(func: Any, value: TiledLogits, args: Any, kwargs: Any) -> TiledLogits | None:
    if args and isinstance(args[0], Tensor):  # to(other) takes over dtype and device.
        if args[0].device != value.device:
            return None
        args = (args[0].dtype, *args[1:])
    if func is Tensor.detach:
        return value.detached()
    if func(torch.empty(1, dtype=value.dtype, device=value.device), *args, **kwargs).device != value.device:
        return None
    return value.changed(lambda tile: func(tile, *args, **kwargs))


def _scaled(func: Any, value: TiledLogits, args: Any, kwargs: Any) -> TiledLogits | None:
    """Apply a function whose other arguments are numbers, or tensors with a number for each class."""

    def is_same_for_all_tokens(arg: Any) -> bool:
        if isinstance(arg, Tensor):
            has_classes = value.form != "transposed" and arg.ndim <= value.ndim
            return not arg.ndim or (has_classes and arg.numel() == arg.size(-1))
        return isinstance(arg, int | float)

    if not all(map(is_same_for_all_tokens, (*args, *kwargs.values()))):
        return None
    return value.changed(lambda tile: func(tile, *args, **kwargs))


def _selected(func: Any, value: TiledLogits, args: Any, kwargs: Any) -> TiledLogits | None:
    """Select a range of tokens."""
    index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
    if value.form != "plain" or not all(part is Ellipsis or isinstance(part, slice) for part in index):
        return None
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index[place : place + 1] = [slice(None)] * (value.ndim - len(index) + 1)
    index += [slice(None)] * (value.ndim - len(index))
    found = [part.indices(size) for part, size in zip(index, value.shape, strict=True)]
    start, stop, step = found.pop(value.ndim + TOKENS)
    others = [size for dim, size in enumerate(value.shape) if dim != value.ndim + TOKENS]
    if step != 1 or stop <= start or found != [(0, size, 1) for size in others]:
        return None
    return TiledLogits(value.head.narrow(start, stop - start), value.dtype, requires_grad=value.requires_grad)


def _argmax(func: Any, value: TiledLogits, args: Any, kwargs: Any) -> Tensor | None:
    given = {**dict(zip(("dim", "keepdim"), args, strict=False)), **kwargs}
    if given.get("keepdim") or given.get("dim") not in (-1, value.ndim - 1) or value.form == "transposed":
        return None
    head = value.head
    head.on_use("argmax", True)
    with torch.no_grad():
        found = [head.compute(head.hidden.narrow(TOKENS, *tile)).argmax(-1) for tile in head.tiles()]
    classes = torch.cat(found, -1)
    return classes.flatten() if value.form == "flat" else classes


def _cross_entropy(func: Any, logits: TiledLogits, args: Any, kwargs: Any) -> Tensor | None:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, reduction = given.pop("target", None), given.pop("reduction", "mean")
    is_plain = given.get("size_average") is None and given.get("reduce") is None
    if not is_plain or reduction not in ("none", "sum", "mean") or not isinstance(target, Tensor):
        return None
    # The classes must be the second dimension, or the last one of two.
    has_class_second = logits.form == "transposed" and logits.ndim == 3
    if target.is_floating_point() or not (has_class_second or (logits.ndim == 2 and logits.form != "transposed")):
        return None
    if list(target.shape) != [size for index, size in enumerate(logits.shape) if index != 1]:
        return None
    head, weight, ignore_index = logits.head, given.get("weight"), given.get("ignore_index", -100)
    head.on_use("cross_entropy", True)
    targets = target.view(head.shape[:-1])
    own_reduction = "none" if reduction == "none" else "sum"

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        losses: Tensor = func(head.compute(hidden).flatten(0, -2), target.flatten(), reduction=own_reduction, **given)
        return losses.view(target.shape) if reduction == "none" else losses

    found = [
        on_tile(head.begin, loss, head.hidden.narrow(TOKENS, *tile), targets.narrow(-1, *tile).contiguous())
        for tile in head.tiles()
    ]
    if reduction == "none":
        return torch.cat(found, -1).view(target.shape)
    total: Tensor = torch.stack(found).sum()
    if reduction == "sum":
        return total
    is_target = target != ignore_index
    mean: Tensor = total / (is_target.sum() if weight is None else weight[target[is_target]].sum())
    return mean


TiledLogits.on_parts = (
    ({functional.cross_entropy}, _cross_entropy),
    (RESHAPES, _reshaped),
    (TRANSPOSES, _transposed),
    (CASTS, _cast),
    (_ELEMENTWISE, _scaled),
    (functions_of("argmax"), _argmax),
    ({Tensor.__getitem__}, _selected),
)
