"""Find out whether a gradient is not finite on any rank, and let optimizers skip the step then."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_dist._compat import created_with, without_step_hooks
from lightning_dist.mesh.collectives import any_of_flags
from lightning_dist.mesh.deferred_read import DeferredRead
from lightning_dist.model.tensor_state import is_remote

__all__ = ["NonFiniteGradients"]

_NUM_LATE = 2
"""Number of optimizer steps after which the host reads what a device has found. All ranks must read it in the same
step, and by then it has arrived."""


class NonFiniteGradients:
    """Collect whether gradients are finite, and agree on it between all ranks.

    On the CPU, the host knows before the optimizer step, and the caller skips it. On an accelerator, the host would
    have to wait for the backward. If all optimizers are fused, they are given the result as ``found_inf`` on the
    device, as ``torch.amp.GradScaler`` does, and skip the step by themselves; the host reads the result two steps
    later. A scaler of losses does all this itself. Only optimizers that are not fused make the host wait; those of
    torch become fused where the user has left the choice to torch.

    Creating an instance is a collective over all processes.

    Args:
        device: Device of the gradients.
        scales_losses: Whether a scaler of losses skips such steps.
    """

    def __init__(self, device: torch.device, scales_losses: bool) -> None:
        self._device = device
        self._scales_losses = scales_losses
        everyone = dist.new_group(backend=created_with("gloo"), group_desc="non-finite gradients")
        # torch.distributed keeps the group. A second reference would keep its connections open after an error here.
        self._everyone = weakref.ref(everyone)
        self._optimizers: list[Optimizer] = []
        self._are_finite: list[Tensor] = []
        self._late: deque[DeferredRead] = deque()

    @property
    def is_skipped_on_device(self) -> bool:
        """Return whether the optimizers or a scaler skip a step without the host."""
        are_fused = bool(self._optimizers) and all(map(_is_fused, self._optimizers))
        return self._device.type != "cpu" and (self._scales_losses or are_fused)

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Keep ``optimizer``, to which results are given, and return a function that forgets it.

        On an accelerator, it becomes fused if it can on all ranks, which may have parameters of other stages. It stays
        fused afterwards. This is a collective over all processes.
        """
        self._optimizers.append(optimizer)
        loaded = None
        if self._device.type != "cpu" and not self._scales_losses:
            everyone = self._everyone()
            assert everyone is not None
            if not any_of_flags([not _may_become_fused(optimizer, self._device)], everyone)[0]:
                _make_fused(optimizer)
                loaded = optimizer.register_load_state_dict_post_hook(_make_fused)

        def forget() -> None:
            if loaded is not None:
                loaded.remove()
            self._optimizers.remove(optimizer)
            vars(optimizer).pop("found_inf", None)

        return forget

    def add(self, total: Tensor) -> None:
        """Take the sum of some gradients, which is finite only if all of them are."""
        self._are_finite.append(torch.isfinite(total))

    def clear(self) -> None:
        """Forget the gradients of a backward that has failed."""
        self._are_finite = []

    def found(self) -> bool:
        """Return whether a gradient was not finite on any rank before an optimizer step. This is a collective.

        If the device skips the step, the result is that of two optimizer steps before.
        """
        are_finite, self._are_finite = self._are_finite, []
        if not self.is_skipped_on_device:
            is_finite = not are_finite or bool(torch.stack(are_finite).all())
            everyone = self._everyone()
            assert everyone is not None
            return any_of_flags([not is_finite], everyone)[0]
        if are_finite:
            is_found = torch.stack(are_finite).all().logical_not().to(torch.float32)
        else:
            is_found = torch.zeros((), device=self._device)
        dist.all_reduce(is_found, dist.ReduceOp.MAX)
        if not self._scales_losses:
            for optimizer in self._optimizers:
                optimizer.found_inf = is_found  # type: ignore[attr-defined]
        self._late.append(DeferredRead(is_found))
        return len(self._late) > _NUM_LATE and bool(self._late.popleft().result())


_WITH_FOUND_INF = (optim.Adagrad, optim.Adam, optim.AdamW, optim.SGD)
"""Optimizers whose fused kernels read ``found_inf``."""


def _is_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads ``found_inf``."""
    return isinstance(optimizer, _WITH_FOUND_INF) and all(group.get("fused") for group in optimizer.param_groups)


def _may_become_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether torch may choose how an optimizer steps, and has a fused step for its parameters."""
    groups = optimizer.param_groups
    if type(optimizer) not in _WITH_FOUND_INF or any(
        group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
        for group in groups
    ):
        return False
    params = [param for group in groups for param in group["params"] if not is_remote(param)]
    try:
        for dtype in {param.dtype for param in params}:
            tried = torch.zeros(1, dtype=dtype, device=device, requires_grad=True)
            tried.grad = torch.zeros_like(tried)
            make: Any = type(optimizer)
            with without_step_hooks():
                make([tried], fused=True).step()
    except RuntimeError:  # The device or the dtype has no such step.
        return False
    return all(param.device.type == device.type for param in params)


def _make_fused(optimizer: Optimizer) -> None:
    """Let an optimizer take fused steps from now on, also if a state was loaded from a run without them."""
    for group in optimizer.param_groups:
        group["fused"] = True
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if isinstance(state.get("step"), Tensor) and not is_remote(param):
                state["step"] = state["step"].to(param.device, torch.float32)
