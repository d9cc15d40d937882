"""Step the optimizer inside the backward: update the parameters of a unit as soon as their gradients are reduced.

The gradients of a unit are freed before those of the next one are computed, so that a rank never holds all gradients of
its shards (Lv et al., 2023, LOMO). A hook of the user that runs after the backward therefore finds no gradients: if it
reads or sets one, it is refused by name. Hooks of ``register_post_accumulate_grad_hook`` run before the update.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_dist._compat import GRADIENT_HANDLING, move_post_accumulate_hook_last, step_hooks
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.shard_step import ELEMENTWISE, LocalStep
from lightning_dist.techniques.options import Arguments, Build, Fit, Run, TechniqueOptions
from lightning_dist.techniques.protocol import Parallel, Rows, Technique

__all__ = ["StepInBackward", "StepInBackwardOptions"]


@dataclass(frozen=True)
class StepInBackwardOptions(TechniqueOptions):
    """Choose whether optimizers step inside of the backward.

    Args:
        step_in_backward: Whether optimizers update sharded parameters while the backward runs, as soon as their
            gradients are reduced, so that a rank never holds all gradients.
    """

    step_in_backward: bool = False

    is_for_training = True

    def check_fit(self, run: Run, fit: Fit, arguments: Arguments) -> None:
        """Refuse steps in the backward if something needs all gradients at once, or if they would save no memory."""
        if not self.step_in_backward:
            return
        layout = run.layout
        hooks = (
            "backward", "configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step"
        )  # fmt: skip
        reasons = {
            f"{layout}: nothing is sharded, so that all gradients exist in any case": layout.num_shards == 1,
            f"pp_size={layout.pp}: a pipeline reduces all gradients at the end": layout.pp > 1,
            f"gradient_clip_val={fit.gradient_clip_val}: the norm needs all gradients": fit.gradient_clip_val,
            f"accumulate_grad_batches={fit.accumulate_grad_batches}": fit.accumulate_grad_batches > 1,
            "GradientAccumulationScheduler": fit.changes_accumulation,
            f"precision={run.precision!r} with a loss scale: an overflow skips the whole step": run.scales_losses,
            f"{fit.master_weights} with master weights": fit.master_weights,
            "compression": arguments["compression"],
            "sync": arguments["sync"],
            "automatic_optimization = False": not fit.is_automatic,
            **{f"{hook}, which would see updated weights and no gradients": True for hook in fit.overridden(hooks)},
        }
        for reason, is_given in reasons.items():
            if is_given:
                raise ValueError(f"step_in_backward=True with {reason}. Leave one of the two out.")

    def check_comparison(self) -> None:
        """Refuse a comparison of gradients, which are freed before."""
        if self.step_in_backward:
            raise ValueError(
                "step_in_backward=True frees gradients before they can be compared: check the strategy without it."
            )

    def needs_shards(self, device: torch.device, is_asked: bool) -> str:
        """Return the argument if the user asks for whole parameters; optimizers that need them are refused anyway."""
        return "step_in_backward=True" if self.step_in_backward and is_asked else ""

    def memory_traits(self, device: torch.device) -> Mapping[str, bool]:
        """Return whether gradients are freed in the backward."""
        return {"steps_in_backward": self.step_in_backward}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique if it is asked for."""
        if self.step_in_backward:
            yield StepInBackward()


class StepInBackward(Technique):
    """Let optimizers update the parameters of sharded units while the backward runs.

    A parameter that this rank has not used in the step is updated at the end, if another rank has used it.
    """

    def __init__(self) -> None:
        self._stepped: set[nn.Parameter] = set()
        """The parameters that were updated since the last optimizer step."""
        self._optimizers: list[Optimizer] = []
        self._names: dict[nn.Parameter, str] = {}
        """The full names of the parameters that are updated in the backward."""
        self._hooks: dict[nn.Parameter, int] = {}
        """The keys of the hooks that update them."""
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        """The parameter group of each parameter in its optimizer, and its place there, when it was last looked up."""
        self._has_freed = False
        """Whether a gradient has been freed that one process would still have."""

    def attach(self, parallel: Parallel) -> None:
        """Keep the module, whose groups do not exist yet."""
        self._parallel = parallel

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let ``optimizer`` update each sharded parameter when its gradient has been reduced.

        Raises:
            ValueError: If an update may depend on several parameters, or somebody watches the optimizer's steps.
        """
        _refuse_optimizer(optimizer)
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
                    hook = partial(_on_gradient, weakref.ref(self), optimizer, groups[param], names[param])
                    handle = param.register_post_accumulate_grad_hook(hook)
                    handles.append(handle)
                    self._hooks[param], self._names[param] = handle.id, names[param]
        self._optimizers.append(optimizer)
        self._has_freed = False

        def undo() -> None:
            for handle in handles:
                handle.remove()
            for group in groups.values():
                group.steps_in_backward = False
            self._optimizers.clear()
            for kept in (self._hooks, self._names, self._places):
                kept.clear()
            self._stepped.clear()
            self._has_freed = False

        return undo

    def step(self, optimizer: Optimizer, group: ParameterGroup, name: str, param: nn.Parameter) -> None:
        """Update ``param`` and free its gradient, if this rank has used it in the backward.

        Args:
            optimizer: The optimizer of the parameter.
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
        options = self._options_of(param, optimizer)
        if options is None:  # The optimizer has lost the parameter since the fit began.
            return
        self._stepped.add(param)
        before = optimizer.param_groups
        optimizer.param_groups = [{**options, "params": [param]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = before
        param.grad = None
        self._has_freed = True

    def _options_of(self, param: nn.Parameter, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the parameter group that ``param`` is in now; None: it is in none.

        Schedules change the options of a group, and loading a checkpoint gives the optimizer other groups.
        """
        groups: list[dict[str, Any]] = optimizer.param_groups
        index, place = self._places.get(param, (0, 0))
        if index < len(groups) and place < len(groups[index]["params"]) and groups[index]["params"][place] is param:
            return groups[index]
        now = {other: (i, k) for i, options in enumerate(groups) for k, other in enumerate(options["params"])}
        self._places |= now
        return groups[now[param][0]] if param in now else None

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Forget which parameters the last step has updated.

        Raises:
            ValueError: If somebody has begun to watch an optimizer's steps.
        """
        self._stepped.clear()
        for optimizer in self._optimizers:
            _refuse_step_hooks(optimizer)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Let the hooks that the user has put on parameters run before their updates in this context."""
        for param, key in self._hooks.items():
            move_post_accumulate_hook_last(param, key)
        yield

    def after_optimizer_step(self) -> None:
        """Forget which parameters the step has updated."""
        self._stepped.clear()

    @contextmanager
    def around_hook(self, what: str) -> Iterator[None]:
        """Refuse a hook in this context that reads or sets a gradient which one process would still have.

        Raises:
            RuntimeError: If the hook does so.
        """
        # Lightning clears the gradients before on_before_backward, so that one process has none either.
        if what.endswith(".on_before_backward"):
            yield
            return
        with _Gradients(partial(self._refuse_access, what)):
            yield

    def _refuse_access(self, what: str, param: Tensor, sets: bool, frame: FrameType) -> None:
        if not self._has_freed:
            return
        is_of_torch = frame.f_globals.get("__name__", "").startswith("torch.")
        if is_of_torch and frame.f_code.co_name in GRADIENT_HANDLING:
            return
        # Between a forward and its backward, modules hold gathered parameters or stand-ins.
        held = (name for name, other in self._parallel.module.named_parameters() if other is param)
        name = self._names[param] if isinstance(param, nn.Parameter) and param in self._names else next(held, None)
        if name not in self._names.values():
            return
        raise RuntimeError(
            f"step_in_backward=True: {what} {'sets' if sets else 'reads'} the gradient of {name!r}, but"
            " the parameter was updated within the backward, and its gradient was freed. Leave step_in_backward out, or"
            " use the gradient in a hook of register_post_accumulate_grad_hook, which runs before the update."
        )

    def table_rows(self) -> Rows:
        """Return a row that says when parameters are updated."""
        yield "updated", "parameters, in the backward, as soon as their gradients are reduced"


_TENSOR: Any = Tensor  # Its attributes are descriptors on the class, which torch's stubs do not declare.
_GRAD_GET, _GRAD_SET = _TENSOR.grad.__get__, _TENSOR.grad.__set__


class _Gradients(TorchFunctionMode):
    """Observe which gradients are read and set.

    Args:
        on_access: Function that is called with a tensor, whether its gradient is set and not read, and the frame of the
            code that does so.
    """

    def __init__(self, on_access: Callable[[Tensor, bool, FrameType], None]) -> None:
        super().__init__()
        self._on_access = on_access

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_GRAD_GET, _GRAD_SET):
            self._on_access(args[0], func == _GRAD_SET, sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _on_gradient(
    technique: weakref.ref[StepInBackward], optimizer: Optimizer, group: ParameterGroup, name: str, param: Tensor
) -> None:
    alive = technique()
    if alive is not None:
        assert isinstance(param, nn.Parameter)
        alive.step(optimizer, group, name, param)


def _refuse_optimizer(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise ValueError(
            f"step_in_backward=True with {name}, whose update of a parameter may depend on others. Use one of"
            f" torch.optim's {_listed(sorted(cls.__name__ for cls in ELEMENTWISE))}, or leave step_in_backward out."
        )
    _refuse_step_hooks(optimizer)


def _refuse_step_hooks(optimizer: Optimizer) -> None:
    if any(not isinstance(getattr(hook, "__self__", None), LocalStep) for hook in step_hooks(optimizer)):
        raise ValueError(
            f"step_in_backward=True, and {type(optimizer).__name__} has hooks of register_step_pre_hook or"
            " register_step_post_hook (or of torch's functions register_optimizer_step_pre_hook and"
            " register_optimizer_step_post_hook), which would run for each parameter. Remove them, or leave"
            " step_in_backward out."
        )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
