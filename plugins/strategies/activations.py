"""Turn the argument ``activation_checkpointing`` of a strategy into the engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from lightning_dist.activation_checkpointing import CheckpointingMode, Kind

__all__ = ["CheckpointingArgument", "checkpointing_mode"]

CheckpointingArgument = bool | str | dict[str, float]
"""Whether activations are computed again, or the name of a mode, or a mode with its number."""


def checkpointing_mode(value: bool | str | Mapping[str, float]) -> CheckpointingMode:
    """Return what the argument ``activation_checkpointing`` of a strategy asks for.

    Args:
        value: False or ``"none"``; True or ``"full"``; ``"selective"``; ``"offload"``; ``{"every": k}``: the
            activations of every ``k``-th block are computed again; ``{"budget": b}``: those of so many blocks that at
            most the fraction ``b`` of the activations is kept.

    Raises:
        ValueError: If ``value`` is none of these.
    """
    names = get_args(Kind)
    if isinstance(value, bool):
        return checkpointing_mode("full" if value else "none")
    if isinstance(value, str) and value in names:
        return CheckpointingMode(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping) and len(value) == 1:
        key, number = next(iter(value.items()))
        if key == "every" and number >= 1 and number == int(number):
            return CheckpointingMode("full", every=int(number))
        if key == "budget" and 0 <= number <= 1:
            return CheckpointingMode("none" if number == 1 else "full", budget=number)
    raise ValueError(
        f"activation_checkpointing={value!r} must be one of {', '.join(map(repr, names))}, True (as 'full'), False (as"
        " 'none'), {'every': k} with a number of blocks k of at least 1, or {'budget': b} with the fraction b of the"
        " activations that is kept, between 0 and 1."
    )
