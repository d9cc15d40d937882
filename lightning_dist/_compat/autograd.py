"""Run functions when a backward begins or ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.optim import Optimizer

__all__ = [
    "around_backwards",
    "around_grads",
    "around_zero_grad",
    "at_end_of_backward",
    "compile_backwards_without_autocast",
    "is_in_backward",
]


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward that runs now.

    Replaced by: a public way to queue a function.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


@contextmanager
def around_backwards(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` around every ``loss.backward()`` and ``torch.autograd.backward`` that runs in this context.

    Replaced by: hooks of torch.autograd that are called when a backward begins and ends.

    Args:
        context: Function that returns a new context for each backward.
    """
    with _around("backward", context):
        yield


@contextmanager
def around_grads(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` around every ``torch.autograd.grad`` that runs in this context.

    Replaced by: the same as for :func:`around_backwards`.

    Args:
        context: Function that returns a new context for each call.
    """
    with _around("grad", context):
        yield


@contextmanager
def _around(name: str, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    original = getattr(torch.autograd, name)

    @wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    setattr(torch.autograd, name, within)
    try:
        yield
    finally:
        setattr(torch.autograd, name, original)


@contextmanager
def around_zero_grad(cleared: Callable[[Collection[nn.Parameter], bool], None]) -> Iterator[None]:
    """Call ``cleared`` after every ``zero_grad()`` of an optimizer or a module that runs in this context.

    Replaced by: a hook of torch.optim.Optimizer for its ``zero_grad``.

    Args:
        cleared: Function that is called with the parameters, and with whether their gradients were set to None instead
            of zero.
    """
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    @wraps(of_optimizer)
    def optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        of_optimizer(self, set_to_none)
        cleared([param for group in self.param_groups for param in group["params"]], set_to_none)

    @wraps(of_module)
    def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        of_module(self, set_to_none)
        cleared(list(self.parameters()), set_to_none)

    Optimizer.zero_grad, nn.Module.zero_grad = optimizer_zero_grad, module_zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.zero_grad, nn.Module.zero_grad = of_optimizer, of_module  # type: ignore[method-assign]


def is_in_backward() -> bool:
    """Return whether autograd is running a backward in this thread.

    Replaced by: a public function that says so.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def compile_backwards_without_autocast() -> None:
    """Let torch.compile compile backwards as they run in eager mode: outside of the forward's autocast.

    It would otherwise compute in lower precision the gradients of layers whose forward has switched autocast off.

    Replaced by: ``"off"`` as torch's default, or an argument of ``torch.compile``.
    """
    functorch_config.backward_pass_autocast = "off"
