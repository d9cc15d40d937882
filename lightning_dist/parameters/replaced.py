"""Raise an error when code uses a parameter that was replaced by another one when its module was made parallel.

A list that was collected in ``__init__`` still holds the old parameters. They get no gradients and no updates, so that
clipping them or adding their norm to the loss would silently have no effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_dist._compat import tree_leaves

__all__ = ["ReplacedParameter", "ReplacedParameterError", "ReplacedParameters"]

_QUESTIONS = frozenset(
    {
        "__format__", "__hash__", "__len__", "__repr__", "dim", "element_size", "is_complex", "is_floating_point",
        "ndimension", "nelement", "numel", "size", "stride",
    }
)  # fmt: skip
_PROPERTIES = frozenset({"device", "dtype", "is_leaf", "itemsize", "layout", "ndim", "requires_grad", "shape"})
"""Names of the properties of a replaced parameter that may be read, because they have not changed."""


class ReplacedParameterError(RuntimeError):
    """Report that code uses a parameter which the module no longer has."""


class ReplacedParameter(nn.Parameter):
    """Represent a parameter that was replaced in its module, and allow only queries such as its shape and dtype."""

    replaced_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` if it only queries properties such as the shape, the dtype or the device.

        Raises:
            ReplacedParameterError: If ``func`` does anything else.
        """
        of_property = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ in _QUESTIONS or (func.__name__ == "__get__" and of_property in _PROPERTIES):
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise ReplacedParameterError(
            f"{of_property or func.__name__} was used of the parameter {first.replaced_name!r} as it was before the"
            " strategy replaced it: it gets no gradients and no updates any more. Code that has kept it, such as a list"
            " made in __init__ or setup, must ask the module where it needs it, by self.parameters() or self.<name>."
        )


class ReplacedParameters:
    """Find out which parameters of a module are replaced while it is made parallel."""

    def __init__(self) -> None:
        self._params: list[tuple[str, weakref.ref[nn.Parameter]]] = []

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Record parameters, by name, that may be replaced; only weak references to them are kept."""
        self._params += [(name, weakref.ref(param)) for name, param in params.items()]

    def refuse(self, module: nn.Module) -> None:
        """Raise an error at any later use of a recorded parameter that ``module`` no longer has."""
        kept = set(map(id, module.parameters()))
        for name, reference in self._params:
            param = reference()
            if param is not None and id(param) not in kept and type(param) is nn.Parameter:
                param.__class__ = ReplacedParameter
                param.replaced_name = name  # type: ignore[attr-defined]  # It is a ReplacedParameter now.
