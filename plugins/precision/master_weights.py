"""Let optimizers update parameters in bfloat16 without losing the updates that are too small for it.

A number in bfloat16 has 8 significant bits, so that an update below 1/512 of a parameter is rounded away. Here the
optimizer updates copies of the parameters in float32, which are made from what each kind of master weights keeps
between the steps. The moments of the optimizer are in float32 as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist._compat import local_of

__all__ = ["KEPT_BYTES", "MasterWeights", "updates_in_float32"]

MasterWeights = Literal["fp32", "kahan", "stochastic"]
"""What is kept besides the parameters in bfloat16: copies in float32 (4 bytes for each number), what rounding has
removed in bfloat16 (2 bytes; compensated summation, Kahan, 1965), or nothing, because rounding is random with the right
mean (stochastic rounding, Gupta et al., 2015)."""

KEPT_BYTES: dict[MasterWeights, int] = {"fp32": 4, "kahan": 2, "stochastic": 0}
"""Number of bytes that are kept for each element besides the parameter and the moments."""

_KEYS = {"fp32": "master", "kahan": "compensation"}
"""Names in the optimizer's state of what is kept."""


@contextmanager
def updates_in_float32(optimizer: Optimizer, kind: MasterWeights, seed: int) -> Iterator[None]:
    """Let ``optimizer`` update copies in float32 of its parameters in this context, which are then rounded.

    Args:
        optimizer: The optimizer; its parameters that are not in bfloat16 are not changed by this context.
        kind: What is kept between the steps, in the state of the optimizer.
        seed: Seed of this step's random numbers for ``"stochastic"``, the same on all replicas.
    """
    swapped: list[_Swapped] = []
    before = [group["params"] for group in optimizer.param_groups]
    positions = itertools.count()
    for group in optimizer.param_groups:
        group["params"] = [_stand_in(optimizer, param, next(positions), kind, swapped) for param in group["params"]]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        for param, wide, _ in swapped:
            if wide in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(wide)
    with torch.no_grad():
        for param, wide, position in swapped:
            if kind == "stochastic":
                # Stages that share a parameter have it at the same position, and round it alike.
                generator = torch.Generator(param.device).manual_seed(seed * 1_000_003 + position)
                _round_at_random(local_of(wide.detach()), local_of(param), generator)
                continue
            param.copy_(wide)
            kept = wide.detach() if kind == "fp32" else (wide.detach() - param).to(torch.bfloat16)
            optimizer.state[param][_KEYS[kind]] = kept


class _Swapped(NamedTuple):
    """Hold a parameter, its copy in float32, and its position among all parameters of the optimizer."""

    param: nn.Parameter
    wide: nn.Parameter
    position: int


def _stand_in(
    optimizer: Optimizer, param: nn.Parameter, position: int, kind: MasterWeights, swapped: list[_Swapped]
) -> nn.Parameter:
    """Return a copy of ``param`` in float32, and add it to ``swapped``.

    Returns:
        The copy; or ``param`` itself if it is not in bfloat16 or has no gradient.
    """
    if param.dtype != torch.bfloat16 or param.grad is None:
        return param
    state: dict[str, Any] = optimizer.state.pop(param, {})
    kept = state.pop(_KEYS[kind], None) if kind in _KEYS else None
    with torch.no_grad():
        wide = param.detach().to(torch.float32)
        if kept is not None and kind == "kahan":
            wide = wide + kept
        elif kept is not None:  # Parameters that other code has changed since the last step have their new values.
            wide = torch.where(kept.to(torch.bfloat16) == param.detach(), kept, wide)
    stand_in = nn.Parameter(wide, requires_grad=param.requires_grad)
    stand_in.grad = param.grad.to(torch.float32)
    if state:  # Optimizers initialise an empty state in their first step. A run without this plugin saves bfloat16.
        optimizer.state[stand_in] = {
            key: value.to(torch.float32) if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
            for key, value in state.items()
        }
    swapped.append(_Swapped(param, stand_in, position))
    return stand_in


def _round_at_random(wide: Tensor, rounded: Tensor, generator: torch.Generator) -> None:
    """Round ``wide`` in float32 to ``rounded`` in bfloat16, up with the probability of the part that is cut off."""
    bits = wide.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    up = ((bits + noise) & -(1 << 16)).view(torch.float32)
    rounded.copy_(torch.where(wide.isfinite(), up, wide))
