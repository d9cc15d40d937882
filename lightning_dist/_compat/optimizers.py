"""Run the code of optimizers without the hooks of their steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer, optimizer

__all__ = ["mark_stepped", "without_step_hooks"]


@contextmanager
def without_step_hooks(*optimizers: Optimizer) -> Iterator[None]:
    """Run steps in this context without the hooks on ``optimizers``, and without those on the steps of all optimizers.

    Replaced by: a public way to call the code of a step without its hooks.
    """
    everywhere: list[Any] = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    kept = [OrderedDict(hooks) for hooks in everywhere]
    own = [(one, one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks) for one in optimizers]
    for hooks in everywhere:
        hooks.clear()
    for one, _, _ in own:
        one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for hooks, before in zip(everywhere, kept, strict=True):
            hooks.update(before)
        for one, before_step, after_step in own:
            one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = before_step, after_step


def mark_stepped(optimizer: Optimizer) -> None:
    """Let schedulers of learning rates find that ``optimizer`` has stepped, although its code did not run on this rank.

    Replaced by: a scheduler that looks at the hooks of steps.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
