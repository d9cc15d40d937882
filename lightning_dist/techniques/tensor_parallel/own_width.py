"""Let a module read the width of its input as the width of this rank's part.

Attention is often written with sizes that it takes from its input, such as ``b, t, c = x.shape`` and then
``q.view(b, t, heads, c // heads)`` or ``y.view(b, t, c)``. The input is whole on every rank, and the outputs of the
split layers are not, so that these sizes have to be those of this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["read_own_width"]

_SHAPE = cast(Any, Tensor.shape).__get__
_KEEP_WIDTH: Collection[Callable[..., Any]] = {
    functional.dropout,
    functional.layer_norm,
    functional.rms_norm,
    Tensor.bfloat16,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.detach,
    Tensor.double,
    Tensor.float,
    Tensor.half,
    Tensor.to,
    Tensor.type,
    Tensor.type_as,
}
"""Functions whose result has the width of their first argument."""


def read_own_width(module: nn.Module, arguments: Sequence[str], num_ranks: int, is_off: Callable[[], bool]) -> None:
    """Divide the last size of some arguments by the number of ranks, where the code of a module reads it.

    What modules inside of it and their hooks read stays whole, and so do the values. The module's ``forward`` is
    replaced on the instance, and is not compiled.

    Args:
        module: A module whose layers are split.
        arguments: Names of the parameters of its ``forward`` whose last size is that of all ranks' features.
        num_ranks: Number of ranks that layers are split over.
        is_off: Function that returns whether the module holds whole parameters now, so that sizes must stay whole.
    """
    running: list[_OwnWidth] = []

    def enter(inner: nn.Module, args: Any) -> None:
        if running:
            running[-1].depth += 1

    def leave(inner: nn.Module, args: Any, output: Any) -> None:
        if running:
            running[-1].leave(args, output)

    for inner in module.modules():
        if inner is not module:
            inner.register_forward_pre_hook(enter, prepend=True)
            inner.register_forward_hook(leave, always_call=True)
    forward = module.forward
    names = signature(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_off():
            return forward(*args, **kwargs)
        given = names.bind(*args, **kwargs).arguments
        mode = _OwnWidth([given[name] for name in arguments if isinstance(given.get(name), Tensor)], num_ranks)
        running.append(mode)
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            running.remove(mode)

    # Torch.compile cannot follow which tensor is which; it compiles what is around this module.
    module.forward = cast(Callable[[Any], Any], torch.compiler.disable)(run)


class _OwnWidth(TorchFunctionMode):
    """Divide the last size of some tensors, and of what is computed from them without another width."""

    def __init__(self, tensors: Sequence[Tensor], num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        # The tensors are kept, so that ids stay theirs, and their whole sizes, which cannot be read any more.
        self._tensors = {id(tensor): (tensor, tensor.shape) for tensor in tensors}
        self.depth = 0
        """Number of modules inside whose forwards have begun."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        if self.depth or id(given) not in self._tensors:
            return result
        if func in _KEEP_WIDTH:
            self._tensors[id(result)] = result, result.shape
        elif func == _SHAPE or func is Tensor.size:
            return self._own(result, cast(Tensor, given).ndim, *args[1:], **(kwargs or {}))
        return result

    def leave(self, args: tuple[Any, ...], output: Any) -> None:
        """Note that the forward of a module inside, such as a norm, has ended."""
        self.depth = max(self.depth - 1, 0)
        _, size = self._tensors.get(id(args[0]), (None, None)) if args and not self.depth else (None, None)
        if isinstance(output, Tensor) and output.shape == size:
            self._tensors[id(output)] = output, output.shape

    def _own(self, size: Any, ndim: int, dim: int | None = None) -> Any:
        if dim is None:
            return torch.Size((*size[:-1], size[-1] // self._num_ranks))
        return size // self._num_ranks if dim in (-1, ndim - 1) else size
