"""Run optimizer steps on another device than that of the parameters, or with states that are kept on a disk.

The parameters are stepped in parts of some megabytes, so that few of them are on the other device, or in memory, at any
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dist._compat import dtensor_like, local_of, replace_local, step_hooks
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.parameters.memory_use import PART_BYTES
from lightning_dist.parameters.shard_step import ELEMENTWISE, LocalStep
from lightning_dist.techniques.offload.mapped_file import MappedFile

__all__ = ["OffloadedStep"]

_OF_ONE_PARAMETER = ELEMENTWISE | {optim.Muon}
"""Optimizers whose update of a parameter does not depend on other parameters, which may be stepped in parts."""


class OffloadedStep:
    """Replace ``optimizer.step`` by one that runs on ``device``.

    The step runs once for each part of the parameters if no update depends on other parameters, as in torch's
    optimizers, and nobody has registered hooks on the step; otherwise it runs once for all of them.

    Args:
        optimizer: The optimizer. Its parameters stay where they are.
        device: Device on which the step runs, and to which the states of the optimizer are moved.
        states: File in which the states are kept between steps; None: they are kept in the memory of ``device``.
        params: File in which the parameters may be, whose pages are released after the step; None: there is none.
        part_bytes: Size of the parameters that are stepped at a time.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        states: MappedFile | None,
        params: MappedFile | None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._file = states
        self._param_file = params
        self._part_bytes = part_bytes
        self._original: Callable[..., Any] = optimizer.step

        @wraps(self._original)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self._step(closure, kwargs)

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # Schedulers need a method.

    def remove(self) -> None:
        """Give the optimizer its own step back."""
        self._optimizer.step = self._original  # type: ignore[method-assign]

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        # A fused step divides by the scale of the loss itself, and copies it between devices without waiting for it.
        for name in ("grad_scale", "found_inf"):
            if isinstance(value := getattr(self._optimizer, name, None), Tensor):
                setattr(self._optimizer, name, value.to(self._device))
        for part in self._parts():
            with self._moved(part):
                self._original(**kwargs)
        return output

    def _parts(self) -> list[set[int]]:
        """Return sets of ids of the parameters with gradients, each of which is stepped at a time."""
        parts: list[set[int]] = [set()]
        num_bytes = 0
        may_divide = type(self._optimizer) in _OF_ONE_PARAMETER and not self._has_foreign_hooks()
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None or is_remote(param):
                    continue
                size = local_of(param).numel() * param.element_size()
                if parts[-1] and may_divide and num_bytes + size > self._part_bytes:
                    parts.append(set())
                    num_bytes = 0
                parts[-1].add(id(param))
                num_bytes += size
        return parts

    def _has_foreign_hooks(self) -> bool:
        return any(not isinstance(getattr(hook, "__self__", None), LocalStep) for hook in step_hooks(self._optimizer))

    @contextmanager
    def _moved(self, part: set[int]) -> Iterator[None]:
        """Let the optimizer have only the parameters of ``part`` in this context, on the device of the step."""
        optimizer = self._optimizer
        before = [(group, group["params"]) for group in optimizer.param_groups]
        params = [param for _, all_params in before for param in all_params if id(param) in part]
        moved = self._move(params)
        stand_ins = {id(param): stand_in for param, stand_in in moved}
        for group, all_params in before:
            group["params"] = [stand_ins[id(param)] for param in all_params if id(param) in part]
        try:
            yield
        finally:
            for group, all_params in before:
                group["params"] = all_params
            for param, stand_in in moved:
                if stand_in is not param and stand_in in optimizer.state:
                    optimizer.state[param] = optimizer.state.pop(stand_in)
        with torch.no_grad():
            for param, stand_in in moved:
                if stand_in is not param:
                    local_of(param).copy_(local_of(stand_in.detach()))
                self._keep(optimizer.state.get(param, {}))
        if self._param_file is not None:
            self._param_file.release(params)

    def _move(self, params: Sequence[nn.Parameter]) -> list[_Moved]:
        """Return the parameters with copies on the device of the step, which have their gradients and states."""
        state = self._optimizer.state
        # On an accelerator, the number of steps stays on the CPU, where an update reads it, unless a kernel reads it. A
        # step on the CPU needs everything there, such as the averages of a parameter without dimensions.
        moves_scalars = {
            param
            for group in self._optimizer.param_groups
            if self._device.type == "cpu" or group.get("fused") or group.get("capturable")
            for param in group["params"]
        }
        moved: list[_Moved] = []
        for param in params:
            if local_of(param).device == self._device:
                moved.append(_Moved(param, param))
                continue
            assert param.grad is not None
            stand_in = nn.Parameter(_to(param.detach(), self._device), requires_grad=param.requires_grad)
            stand_in.grad = _to(param.grad, self._device)
            values = state.pop(param, None)
            if values:  # After a checkpoint was loaded, they are on the device of the parameters.
                state[stand_in] = {
                    key: _to(value, self._device)
                    if isinstance(value, Tensor) and (value.ndim or param in moves_scalars)
                    else value
                    for key, value in values.items()
                }
            moved.append(_Moved(param, stand_in))
        if self._device.type == "cpu" and any(stand_in is not param for param, stand_in in moved):
            torch.accelerator.synchronize()  # The copies to pinned memory must have ended.
        return moved

    def _keep(self, values: dict[str, Any]) -> None:
        """Move the tensors of a parameter's state into the file, and release their pages."""
        if self._file is None:
            return
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if value.ndim and not self._file.holds(value):
                placed = self._file.place(local_of(value))
                if isinstance(value, DTensor):
                    replace_local(value, placed)
                else:
                    values[key] = placed
            self._file.release([values[key]])


class _Moved(NamedTuple):
    """Hold a parameter and what the optimizer steps in its place, which may be the parameter itself."""

    param: nn.Parameter
    stand_in: nn.Parameter


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``tensor`` on ``device``, or itself if it is there. The device may still have to make it."""
    local = local_of(tensor)
    if local.device == device:
        return tensor
    copy = torch.empty_like(local, device=device, pin_memory=device.type == "cpu")
    copy.copy_(local, non_blocking=True)
    return dtensor_like(copy, tensor) if isinstance(tensor, DTensor) else copy
