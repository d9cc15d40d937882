"""Keep the results of some operations when a block's other activations are computed again.

torch's own ``create_selective_checkpoint_contexts`` raises an error if the rerun calls any operation more often than
the forward, such as views, whose number differs under tensor parallelism, and if a kept result is changed in place.
Here only products and attention are compared, and a result that was changed is computed again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_dist._compat import DispatchMode, detached, named_arguments, tree_leaves, tree_map, version_of

__all__ = ["selective_contexts"]

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default}
)
"""Matrix products, of which every second result is kept."""


@cache
def _is_attention(operation: Any) -> bool:
    """Return whether ``operation`` is a kernel of attention, whose result is kept: it takes long, and is small.

    A kernel with dropout runs again: if it did not, it would draw no random numbers, and later layers would draw others
    than in the forward.
    """
    name = str(operation)
    return "scaled_dot_product" in name and "backward" not in name


class _Call:
    """Hold an operation of the forward, the shapes of its arguments, and its result if it is kept."""

    def __init__(self, operation: Any, args: Any, result: Any) -> None:
        self._operation = operation
        self._shapes = _shapes(args)
        self._result = _detached(result)
        self._versions = _versions(self._result)

    def is_like(self, operation: Any, args: Any) -> bool:
        """Return whether this is the same operation on arguments of the same shapes."""
        return operation is self._operation and _shapes(args) == self._shapes

    @property
    def result(self) -> Any:
        """Return the result; None if it was not kept, or was changed in place since."""
        return self._result if _versions(self._result) == self._versions else None


class _Mode(DispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that functions that the user compiles are compiled under this mode, too."""
        return True


class _Forward(_Mode):
    """Keep the results of attention and of every second matrix product."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self._num_products += 1
            self._calls.append(_Call(func, args, result if self._num_products % 2 else None))
        elif _is_attention(func):
            self._calls.append(_Call(func, args, None if _has_dropout(func, args, kwargs) else result))
        return result


class _Rerun(_Mode):
    """Return kept results in place of computing them again."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._num_calls = 0

    def __enter__(self) -> Any:
        self._num_calls = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None and self._num_calls < len(self._calls):
            raise RuntimeError(f"{_OTHER_OPERATIONS} (fewer matrix products). {_FIX}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS or _is_attention(func):
            index, self._num_calls = self._num_calls, self._num_calls + 1
            if index >= len(self._calls) or not self._calls[index].is_like(func, args):
                raise RuntimeError(f"{_OTHER_OPERATIONS} ({func}). {_FIX}")
            result = self._calls[index].result
            if result is not None:
                # The graph of the rerun must not be kept alive by what is held here.
                return _detached(result)
        return func(*args, **(kwargs or {}))


_OTHER_OPERATIONS = (
    "activation_checkpointing='selective': when a block ran again in the backward, it computed with other operations"
    " than in its forward"
)
_FIX = "Use activation_checkpointing='full', which compares nothing, or {'every': 2}."


def selective_contexts() -> tuple[DispatchMode, DispatchMode]:
    """Return the contexts of one forward of a block and of its rerun, for :func:`torch.utils.checkpoint.checkpoint`."""
    calls: list[_Call] = []
    return _Forward(calls), _Rerun(calls)


def _shapes(args: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


def _has_dropout(operation: Any, args: Any, kwargs: Any) -> bool:
    return bool(named_arguments(operation, args, kwargs).get("dropout_p", 0.0))


def _versions(result: Any) -> list[int]:
    return [version_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _detached(result: Any) -> Any:
    """Return ``result`` with detached tensors that have the versions of those in ``result``."""
    return tree_map(lambda leaf: detached(leaf) if isinstance(leaf, Tensor) else leaf, result)
