"""Detect that a step clears a gradient on a tensor other than the one that holds the gradient.

In a step, modules hold copies of the parameters, such as gathered parameters, while the gradients are on the parameters
that the optimizer sees. A step that sets ``param.grad = None`` would clear nothing. Each copy is therefore
given a stand-in as its gradient. If the stand-in is missing later, the gradient of the parameter is cleared.

The opposite happens after a backward that does not reduce gradients. It leaves the gradients of sharded parameters on
the gathered parameters, whereas ``optimizer.zero_grad()`` clears those of the sharded ones. Until the next backward of
the step, the sharded parameters therefore have a stand-in as their gradient. If the stand-in is missing when that
backward begins, the accumulated gradient is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from lightning_dist._compat import KEEPS_OBJECT, USE_COUNT, local_of, tree_leaves, version_of, without_memory

__all__ = ["AccumulatedGradients", "GradientsOfCopies", "UnreducedGradient"]

_ADVICE = (
    "Read, clip, scale or step on gradients after a self.manual_backward(loss) that reduces them (with sync_grad=True)"
    " and clear them by zero_grad(set_to_none=True)."
)

_QUESTIONS = frozenset(
    {USE_COUNT, "__hash__", "dim", "is_complex", "is_floating_point", "numel", "requires_grad_", "size", "stride"}
)
"""Names of tensor functions that do not read the tensor's elements."""

_CONVERSIONS = frozenset({"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"})


class UnreducedGradient(torch.Tensor):
    """Stand in, without elements, for the gradient of a sharded parameter that no backward has reduced yet.

    Args:
        param: The sharded parameter, whose shape and strides the stand-in gets.
        name: Full name of the parameter, for errors.
        like: Tensor with the dtype and device that the stand-in gets; None: ``param``.
    """

    _name: str
    _why = "is accumulated and not reduced over the ranks yet"

    @staticmethod
    def __new__(cls, param: Tensor, name: str, like: Tensor | None = None) -> Self:
        """Create a tensor of the parameter's shape without memory."""
        like = param if like is None else like
        self = without_memory(cls, param.shape, strides=param.stride(), dtype=like.dtype, device=like.device)
        self._name = name
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer questions about the shape, the dtype and the device, allow conversions, and refuse everything else."""
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__" or name in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name == KEEPS_OBJECT:
            return False
        if name == "__deepcopy__":  # The copy of a parameter begins without an accumulated gradient.
            return None
        if name in _CONVERSIONS and isinstance(args[0], cls):
            sample = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            return cls(args[0], args[0]._name, func(sample, *args[1:], **kwargs))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute with the stand-in.

        Raises:
            RuntimeError: Always.
        """
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)).refuse(func.__name__)

    def refuse(self, what: str) -> NoReturn:
        """Refuse to read or change the gradient, which has no elements.

        Args:
            what: Name of the function that was called with the stand-in.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{what} was called on the gradient of the parameter {self._name!r}, which {self._why}. {_ADVICE}"
        )


class _GradientOfShards(UnreducedGradient):
    is_zeroed = False
    _why = "is that of its shards, from an earlier backward"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.__name__ in ("detach_", "zero_"):
            args[0].is_zeroed |= func.__name__ == "zero_"
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class AccumulatedGradients:
    """Detect which parameters' gradients a step clears between two backwards."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[nn.Parameter, Tensor, int]] = {}

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Give each parameter without a gradient a stand-in as its gradient, and watch the gradients of all parameters.

        Args:
            params: Parameters by name, whose gradients are accumulated on other tensors.
        """
        for name, param in params.items():
            if param.grad is None:
                param.grad = UnreducedGradient(param, name)
            self._watched[name] = param, param.grad, version_of(local_of(param.grad))

    def take_cleared(self) -> list[str]:
        """Return the names of the watched parameters whose gradients were cleared, and stop watching.

        Raises:
            RuntimeError: If a gradient was changed, or replaced by another one.
        """
        for name, (param, gradient, version) in self._watched.items():
            if param.grad is None or isinstance(param.grad, UnreducedGradient):
                continue
            if param.grad is not gradient or version_of(local_of(gradient)) != version:
                raise RuntimeError(
                    f"The gradient of the parameter {name!r} was changed while gradients were accumulated that are not"
                    f" reduced over the ranks yet. {_ADVICE}"
                )
        cleared = [name for name, (param, _, _) in self._watched.items() if param.grad is None]
        for param, _, _ in self._watched.values():
            if isinstance(param.grad, UnreducedGradient):
                param.grad = None
        self._watched = {}
        return cleared


class GradientsOfCopies:
    """Detect which gradients a step clears on the tensors that modules hold in place of parameters.

    These copies have stand-ins as gradients only between :meth:`show` and :meth:`take_cleared`, which runs before each
    backward, so that the stand-ins do not disturb autograd.
    """

    def __init__(self) -> None:
        self._shown: list[tuple[str, Tensor, nn.Parameter, _GradientOfShards]] = []

    def show(self, copies: Iterable[tuple[str, Tensor, nn.Parameter]]) -> None:
        """Give each copy a stand-in as its gradient if only its parameter has a gradient.

        Args:
            copies: For each parameter its name, the copy of it that modules hold, and the parameter. A copy may itself
                have a copy, which then comes first.
        """
        for name, copy, param in copies:
            if copy.grad is None and param.grad is not None:
                stand_in = _GradientOfShards(copy, name)
                copy.grad = stand_in
                self._shown.append((name, copy, param, stand_in))

    def forget(self) -> None:
        """Remove the stand-ins without clearing anything, after an error."""
        shown, self._shown = self._shown, []
        for _, copy, _, gradient in shown:
            if copy.grad is gradient:
                copy.grad = None

    def take_cleared(self) -> None:
        """Remove the stand-ins, and clear the gradients of the parameters whose copies no longer have theirs.

        Raises:
            RuntimeError: If a stand-in was replaced by another gradient.
        """
        shown, self._shown = self._shown, []
        for name, copy, param, gradient in reversed(shown):
            if copy.grad is None:
                param.grad = None
            elif copy.grad is not gradient:
                raise RuntimeError(
                    f"The gradient of the parameter {name!r} was replaced before a backward of the step. {_ADVICE}"
                )
            elif gradient.is_zeroed and param.grad is not None:
                param.grad.zero_()
            copy.grad = None
