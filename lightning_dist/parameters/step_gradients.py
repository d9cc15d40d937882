"""Let steps and hooks clear gradients even if the gradients are on other tensors than those that they see.

In a step, modules hold gathered parameters or stand-ins, and not the parameters that the optimizer sees. The gradients
of earlier backwards, however, are on the optimizer's parameters, or on the gathered ones if they are not reduced over
the ranks yet. Whatever a step or a hook clears on one of these tensors is therefore cleared on the others, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dist._compat import around_grads, around_zero_grad, own_parameters
from lightning_dist.parameters.accumulated_gradients import GradientsOfCopies
from lightning_dist.parameters.group import ParameterGroup

__all__ = ["Copies", "StepGradients"]

Copies = Callable[[], Iterable[tuple[str, Tensor, nn.Parameter]]]
"""A function that returns for each parameter its name, the copy that modules hold in a step, and the parameter."""


class StepGradients:
    """Clear the optimizer's gradients when a step or a hook clears those of the tensors that modules hold.

    Args:
        module: The user's module, which holds copies of the parameters during a step.
        groups: The groups of the module's parameters, with the parameters that the optimizer sees.
        copies: Functions that return the copies of parameters that modules hold in a step.
    """

    def __init__(self, module: nn.Module, groups: Sequence[ParameterGroup], copies: Sequence[Copies]) -> None:
        self._module = module
        self._groups = groups
        self._copies = copies
        self._of_copies = GradientsOfCopies()
        self._is_shown = False
        self.has_unreduced = False
        """Whether backwards have left gradients that are not reduced over the ranks yet."""

    @contextmanager
    def watched(self, runs_backwards: bool) -> Iterator[None]:
        """Clear the optimizer's gradients of the parameters whose gradients the step clears in this context.

        The caller must call :meth:`show` when the modules hold the tensors that the step sees.

        Args:
            runs_backwards: Whether the step runs its backwards itself, and so may clear single gradients by
                ``param.grad = None``. Otherwise only calls of ``zero_grad()`` are observed.
        """
        self._is_shown = runs_backwards and torch.is_grad_enabled() and bool(self._copies)
        try:
            with ExitStack() as around:
                around.enter_context(around_zero_grad(self._after_zero_grad))
                if self._is_shown:
                    around.enter_context(around_grads(self._hidden))
                yield
            self.take_cleared()
        except BaseException:
            self._of_copies.forget()
            raise
        finally:
            self._is_shown = False

    def show(self) -> None:
        """Give the tensors that modules hold stand-ins as gradients, if the step runs its own backwards.

        Without them, an assignment ``param.grad = None`` in such a step would be silently ignored.
        """
        if self._is_shown:
            self._of_copies.show(chain.from_iterable(copies() for copies in self._copies))

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        self.take_cleared()
        try:
            yield
        finally:
            self.show()

    def take_cleared(self) -> None:
        """Clear the gradients of the parameters whose copies the step has cleared since :meth:`show`."""
        self._of_copies.take_cleared()

    def before_backward(self) -> None:
        """Clear the optimizer's gradients that the step has cleared on copies, before a backward adds gradients."""
        self.take_cleared()
        for group in self._groups:
            group.drop_cleared()

    def after_backward(self, is_reduced: bool, in_step: bool) -> None:
        """Record whether a backward has left unreduced gradients, and let the step clear gradients again.

        Args:
            is_reduced: Whether the backward has reduced all gradients over the ranks.
            in_step: Whether the step continues after the backward.
        """
        self.has_unreduced = not is_reduced
        for group in self._groups if in_step else ():
            group.watch_unreduced()
        self.show()

    def drop_unreduced(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Drop gradients that backwards have left unreduced on the gathered parameters.

        Args:
            params: The parameters whose gradients are dropped; None: all.
        """
        if self.has_unreduced:
            for group in self._groups:
                group.drop_unreduced(params)
            self.has_unreduced = params is not None

    @contextmanager
    def with_unreduced_cleared(self) -> Iterator[None]:
        """Make ``zero_grad()`` in this context also clear gradients that are accumulated on the gathered parameters."""
        if not self.has_unreduced:
            yield
            return
        with around_zero_grad(self._after_zero_grad):
            yield

    def of_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which the gradients of the tensors that modules hold are those that the optimizer sees.

        It is for hooks between a forward and its backward, which may read the gradients of the last step.
        """
        return _GradientsOfParameters(self._copies) if self._copies else nullcontext()

    @torch.no_grad()
    def _after_zero_grad(self, params: Collection[nn.Parameter], sets_to_none: bool) -> None:
        """Clear the optimizer's gradients of the parameters whose copies in the modules ``zero_grad()`` has cleared.

        Args:
            params: The tensors whose gradients ``zero_grad()`` has cleared.
            sets_to_none: Whether their gradients were set to None instead of zero.
        """
        self.take_cleared()
        modules = dict(self._module.named_modules())
        ids = set(map(id, params))
        for group in self._groups:
            cleared = []
            for name, param in zip(group.names, group.params, strict=True):
                owner, _, key = name.rpartition(".")
                if id(param) in ids or id(own_parameters(modules[owner]).get(key)) in ids:
                    cleared.append(param)
            for param in cleared:
                if sets_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()
            group.drop_unreduced(cleared)
        self.show()


_TENSOR: Any = Tensor  # Its attributes are descriptors on the class, which torch's stubs do not declare.
_GRADIENT = (_TENSOR.grad.__get__, _TENSOR.grad.__set__)


class _GradientsOfParameters(TorchFunctionMode):
    """Read and set the gradients of parameters in place of those of the copies that modules hold.

    Args:
        copies: Functions that return the copies of parameters that modules hold in a step.
    """

    def __init__(self, copies: Sequence[Copies]) -> None:
        super().__init__()
        self._copies = copies
        self._params: dict[int, nn.Parameter] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT:
            args = (self._param_of(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _param_of(self, held: Tensor) -> Tensor:
        if self._params is None:
            found = chain.from_iterable(copies() for copies in self._copies)
            self._params = {id(copy): param for _, copy, param in found}
        while id(held) in self._params and self._params[id(held)] is not held:
            held = self._params[id(held)]
        return held
