"""Stand in for what a step of manual optimization calls besides the model, while the step is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.steps.collectives import stand_ins_for_collectives
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.techniques.pipeline import refuse_gradients_of_parts

__all__ = ["manual_operations", "manual_operations_on_fakes"]


@contextmanager
def manual_operations_on_fakes(module: LightningModule, tracing: StepTracing) -> Iterator[None]:
    """Let a step of manual optimization be traced on fakes in this context, for a pipeline.

    Args:
        module: The user's module, whose tensors are fakes.
        tracing: Object whose ``is_active`` says that a step is traced.
    """
    tracing.is_active, was_active = True, tracing.is_active
    try:
        with stand_ins_for_collectives(tracing.peers), manual_operations(module, refuse_gradients_of_parts):
            yield
    finally:
        tracing.is_active = was_active


@contextmanager
def manual_operations(module: LightningModule, check_grad: Callable[..., None] | None = None) -> Iterator[None]:
    """Let a step of manual optimization run on fakes in this context.

    A backward gives every trained parameter a gradient without values. Optimizers and schedulers do not step.

    Args:
        module: The user's module, whose tensors are fakes.
        check_grad: Function that is called with the names of parameters by their id, and with the arguments of each
            call of ``torch.autograd.grad``; None: nothing is checked.
    """
    optimizers: list[_FakeOptimizer] = []
    with suppress(Exception):  # The run itself raises the error of configure_optimizers.
        optimizers = [_FakeOptimizer(optimizer) for optimizer in _compat.made_optimizers(module)]

    backwards = _FakeBackwards(module, check_grad)
    methods: dict[str, Callable[..., Any]] = {
        "optimizers": lambda use_pl_optimizer=True: optimizers[0] if len(optimizers) == 1 else optimizers,
        "lr_schedulers": lambda: _Ignored(),
        "manual_backward": backwards.run,
        "toggle_optimizer": _ignore,
        "untoggle_optimizer": _ignore,
        "clip_gradients": _ignore,
    }
    before = {name: vars(module)[name] for name in methods if name in vars(module)}
    vars(module).update(methods)
    try:
        with backwards:
            yield
    finally:
        for name in methods:
            vars(module).pop(name, None)
        vars(module).update(before)


class _FakeBackwards(TorchFunctionMode):
    """Give parameters gradients without values where a step calls a backward, which fakes cannot always run.

    Args:
        module: The user's module, whose tensors are fakes.
        check_grad: As for :func:`manual_operations`.
    """

    def __init__(self, module: LightningModule, check_grad: Callable[..., None] | None) -> None:
        super().__init__()
        self._check_grad = check_grad
        self._params = dict(module.named_parameters())

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Stand for a backward of any loss."""
        for param in self._params.values():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            return self.run()
        if func is torch.autograd.grad:
            if self._check_grad is not None:
                self._check_grad({id(param): name for name, param in self._params.items()}, *args, **kwargs)
            inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
            return tuple(map(torch.zeros_like, [inputs] if isinstance(inputs, Tensor) else inputs))
        return func(*args, **kwargs)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Ignore a call."""


class _Ignored:
    """Ignore all calls of methods, and stand for any number of such objects."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ignore

    def __getitem__(self, index: int) -> _Ignored:
        return self

    def __iter__(self) -> Iterator[_Ignored]:
        return iter([self, self])


class _FakeOptimizer:
    """Stand for an optimizer of a LightningModule whose parameters are fakes.

    Args:
        optimizer: The optimizer from ``configure_optimizers``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run ``closure`` once, and change no parameter."""
        return None if closure is None else closure()

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()
