"""Step the optimizer inside the backward: update the parameters of a unit as soon as their gradients are reduced.

The gradients of a unit are freed before those of the next one are computed, so that a rank never holds all gradients of
its shards (Lv et al., 2023, LOMO).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist._compat import step_hooks
from lightning_dist.local_step import ELEMENTWISE, LocalStep
from lightning_dist.parameter_group import ParameterGroup
from lightning_dist.technique import Parallel, Rows, Technique

__all__ = ["StepInBackward"]


class StepInBackward(Technique):
    """Let optimizers update the parameters of sharded units while the backward runs.

    A parameter that this rank has not used in the step is updated at the end, if another rank has used it.
    """

    def __init__(self) -> None:
        self._stepped: set[nn.Parameter] = set()
        """The parameters that were updated since the last optimizer step."""

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, whose groups do not exist yet."""
        self._parallel = parallel

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let ``optimizer`` update each sharded parameter when its gradient has been reduced.

        Raises:
            ValueError: If an update may depend on several parameters, or somebody watches the optimizer's steps.
        """
        _refuse(optimizer)
        handles = []
        names: dict[nn.Parameter, str] = {}
        groups: dict[nn.Parameter, ParameterGroup] = {}
        for group in self._parallel.groups:
            if not group.is_sharded:
                continue
            group.steps_in_backward = True
            names |= dict(zip(group.params, group.names, strict=True))
            groups |= dict.fromkeys(group.params, group)
        for options in optimizer.param_groups:
            for param in options["params"]:
                if (
                    param in groups and param.requires_grad
                ):  # Others, if they are trained later, are updated at the end.
                    hook = partial(_on_gradient, weakref.ref(self), optimizer, options, groups[param], names[param])
                    handles.append(param.register_post_accumulate_grad_hook(hook))

        def undo() -> None:
            for handle in handles:
                handle.remove()
            for group in groups.values():
                group.steps_in_backward = False

        return undo

    def step(
        self,
        optimizer: Optimizer,
        options: dict[str, Any],
        group: ParameterGroup,
        name: str,
        param: nn.Parameter,
    ) -> None:
        """Update ``param`` and free its gradient, if this rank has used it in the backward.

        Args:
            optimizer: The optimizer of the parameter.
            options: The optimizer's parameter group that the parameter is in.
            group: The parameter group of the parameter's unit.
            name: Full name of the parameter.
            param: The parameter, whose gradient has been reduced.

        Raises:
            RuntimeError: If it was updated before in this step.
        """
        if not self._parallel.reduces_gradients:
            return
        if param in self._stepped:
            raise RuntimeError(
                f"step_in_backward=True: a gradient of {name!r} was computed after the parameter had been updated,"
                " because the step uses it outside of the forward of its block, or runs several backwards. Leave"
                " step_in_backward out."
            )
        if not group.is_used(param):  # If no rank has used it, it must not be updated at all.
            return
        self._stepped.add(param)
        before = optimizer.param_groups
        optimizer.param_groups = [{**options, "params": [param]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = before
        param.grad = None

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Forget which parameters the last step has updated."""
        self._stepped.clear()

    def after_optimizer_step(self) -> None:
        """Forget which parameters the step has updated."""
        self._stepped.clear()

    def table_rows(self) -> Rows:
        """Return a row that says when parameters are updated."""
        yield "updated", "parameters, in the backward, as soon as their gradients are reduced"


def _on_gradient(
    technique: weakref.ref[StepInBackward],
    optimizer: Optimizer,
    options: dict[str, Any],
    group: ParameterGroup,
    name: str,
    param: Tensor,
) -> None:
    alive = technique()
    if alive is not None:
        assert isinstance(param, nn.Parameter)
        alive.step(optimizer, options, group, name, param)


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise ValueError(
            f"step_in_backward=True with {name}, whose update of a parameter may depend on others. Use one of"
            f" torch.optim's {_listed(sorted(cls.__name__ for cls in ELEMENTWISE))}, or leave step_in_backward out."
        )
    if any(not isinstance(getattr(hook, "__self__", None), LocalStep) for hook in step_hooks(optimizer)):
        raise ValueError(
            f"step_in_backward=True, and {name} has hooks of register_step_pre_hook or register_step_post_hook, which"
            " would run for each parameter. Remove them, or leave step_in_backward out."
        )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
