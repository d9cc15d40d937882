"""Give autograd this rank's parts of parameters that are distributed over ``tp`` or ``ep`` as plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist import _compat
from lightning_dist.parameters.forms import SameRequiresGrad, put_into_memory
from lightning_dist.parameters.on_use import GatheredOnUse

__all__ = ["LocalParts"]


class LocalParts:
    """Keep this rank's parts of DTensor parameters as plain parameters, and pass their gradients on to the DTensors.

    The parts, and not the DTensors, are the leaves of the autograd graph, because autograd's anomaly mode calls
    functions that DTensors do not support. A part shares the memory of its DTensor.

    Args:
        divisor: Number by which gradients are divided when they are passed on.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._divisor = divisor
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self._stand_ins: dict[nn.Parameter, Tensor] = {}
        self._requires_grad: dict[nn.Parameter, SameRequiresGrad] = {}

    def part_of(self, whole: nn.Parameter) -> nn.Parameter:
        """Return this rank's part of ``whole``, a DTensor; it requires a gradient if ``whole`` does."""
        part = self._parts.get(whole)
        if part is None:
            with torch.inference_mode(False):  # The part is trained after an evaluation that makes it.
                plain = cast(DTensor, whole).to_local().detach()
                part = nn.Parameter(plain, requires_grad=plain.is_floating_point() or plain.is_complex())
            if part.requires_grad:
                part.register_post_accumulate_grad_hook(partial(_hand_on_gradient, whole, self._divisor))  # type: ignore[no-untyped-call]
            self._parts[whole], self._requires_grad[whole] = part, SameRequiresGrad()
        self._requires_grad[whole].copy_to(part, whole)
        return part

    def take_requires_grad(self, whole: nn.Parameter) -> None:
        """Copy ``requires_grad`` from the part of ``whole`` to ``whole``, if a step has changed it on the part."""
        if whole in self._parts:
            self._requires_grad[whole].take_from(self._parts[whole], whole)

    def gathered_on_use(self, whole: nn.Parameter) -> Tensor:
        """Return a tensor with all elements of ``whole``, whose gradients are the same on all ranks.

        For a split parameter, this is a stand-in that is gathered where it is used, which is a collective.
        """
        if isinstance(cast(DTensor, whole).placements[0], Replicate):
            return self._parts[whole]
        if whole not in self._stand_ins:
            self._stand_ins[whole] = GatheredOnUse(whole, partial(self._gather, whole))
        return self._stand_ins[whole]

    def _gather(self, whole: nn.Parameter, split: Tensor, split_axis: str | None = None) -> Tensor:
        """All-gather a parameter or its detached values over ``tp``.

        This is a collective, and all ranks must use the result in the same way.

        Args:
            whole: The parameter, a DTensor over ``tp``.
            split: ``whole`` itself or its detached values.
            split_axis: ``"tp"`` to return this rank's part instead, without communication; None: gather.
        """
        if split_axis is not None:
            return self.part_of(whole)
        replicated = [Replicate()]
        return cast(DTensor, split).redistribute(placements=replicated).to_local(grad_placements=replicated)

    def write_back_data(self, whole: nn.Parameter) -> bool:
        """Write the new values of a part into ``whole``, if the step has replaced the part through ``.data``.

        Returns:
            Whether the part was replaced.
        """
        part = self._parts.get(whole)
        return part is not None and put_into_memory(part, _compat.local_of(whole))

    def follow_memory(self, whole: nn.Parameter) -> None:
        """Let the part of ``whole`` share the memory of ``whole`` again, which ``module.to(...)`` may have replaced."""
        part, memory = self._parts.get(whole), _compat.local_of(whole)
        if part is not None and part.data_ptr() != memory.data_ptr():
            part.data = memory.detach()

    def copies(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each part with its parameter."""
        for whole, part in self._parts.items():
            yield part, whole

    def gradients_left(self) -> set[nn.Parameter]:
        """Return the parameters whose part has a gradient that was not passed on to them, such as one set by hand."""
        return {whole for whole, part in self._parts.items() if part.grad is not None}


@torch.no_grad()
def _hand_on_gradient(whole: nn.Parameter, divisor: int, part: Tensor) -> None:
    """Move the gradient that a backward has computed for this rank's part of ``whole`` to ``whole`` itself."""
    plain, part.grad = cast(Tensor, part.grad).detach(), None
    if plain.is_sparse:  # FSDP2 can reduce only dense gradients.
        plain = plain.to_dense()
    if divisor > 1:
        plain.div_(divisor)  # Autograd has made the gradient for this parameter alone.
    gradient: Tensor = _compat.dtensor_like(plain, whole)
    gradient = _compat.call_gradient_hooks(whole, gradient)
    whole.grad = gradient if whole.grad is None else whole.grad + gradient
    _compat.call_post_accumulate_hooks(whole)
