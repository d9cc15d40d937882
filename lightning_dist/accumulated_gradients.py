"""Let a step clear gradients that are accumulated where it does not see them.

A backward that does not reduce gradients leaves those of sharded parameters on the gathered parameters, whereas
``optimizer.zero_grad()`` clears those of the sharded ones. Until the next backward of the step, the sharded parameters
therefore have a stand-in as their gradient. If it is gone when that backward begins, the step has cleared the gradient,
and what was accumulated is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_dist._compat import local_of

__all__ = ["AccumulatedGradients", "UnreducedGradient"]

_ADVICE = (
    "Read, clip, scale or step on gradients after a backward that reduces them (sync_grad=True), and clear them by"
    " zero_grad(set_to_none=True)."
)


class UnreducedGradient(torch.Tensor):
    """Stand in for the gradient of a sharded parameter that no backward has reduced yet. It has no elements to read.

    Args:
        param: The sharded parameter.
        name: Its full name.
    """

    _name: str

    @staticmethod
    def __new__(cls, param: Tensor, name: str) -> UnreducedGradient:
        """Make a tensor of the same shape without memory."""
        self: UnreducedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        self._name = name
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer questions about the shape, the dtype and the device, and refuse everything else."""
        if func.__name__ == "__get__" or func.__name__ in ("__hash__", "dim", "numel", "size", "stride"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute with the stand-in.

        Raises:
            RuntimeError: Always.
        """
        names = [leaf._name for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise RuntimeError(
            f"{func.__name__} was called on the gradient of the parameter {names[0]!r}, which is accumulated and not"
            f" reduced over the ranks yet. {_ADVICE}"
        )


class AccumulatedGradients:
    """Notice which parameters' gradients a step clears between two backwards."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[nn.Parameter, Tensor, int]] = {}

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Give parameters that have no gradient a stand-in for it, and watch the gradients of all.

        Args:
            params: The parameters whose gradients are accumulated elsewhere, by name.
        """
        for name, param in params.items():
            if param.grad is None:
                param.grad = UnreducedGradient(param, name)
            self._watched[name] = param, param.grad, local_of(param.grad)._version

    def take_cleared(self) -> list[str]:
        """Return the names of the watched parameters whose gradients were cleared, and watch none any more.

        Raises:
            RuntimeError: If a gradient was changed, or replaced by another one.
        """
        watched, self._watched = self._watched, {}
        for name, (param, gradient, version) in watched.items():
            if param.grad is not None and (param.grad is not gradient or local_of(gradient)._version != version):
                raise RuntimeError(
                    f"The gradient of the parameter {name!r} was changed while gradients were accumulated that are not"
                    f" reduced over the ranks yet. {_ADVICE}"
                )
        cleared = [name for name, (param, _, _) in watched.items() if param.grad is None]
        for param, gradient, _ in watched.values():
            if isinstance(gradient, UnreducedGradient):
                param.grad = None
        return cleared
