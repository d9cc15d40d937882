"""Turn the arguments of a strategy about the memory of activations into the engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.activation_checkpointing import CheckpointingMode, Kind
from lightning_dist.techniques.tiling import TilingConfig

__all__ = ["CheckpointingArgument", "checkpointing_mode", "refuse_tiling", "tiling_config"]

CheckpointingArgument = bool | str | dict[str, float]
"""Whether activations are computed again, or the name of a mode, or a mode with its number."""


def checkpointing_mode(value: bool | str | Mapping[str, float]) -> CheckpointingMode:
    """Return what the argument ``activation_checkpointing`` of a strategy asks for.

    Args:
        value: False or ``"none"``; True or ``"full"``; ``"selective"``; ``"offload"``; ``{"every": k}``: the
            activations of every ``k``-th block are computed again; ``{"budget": b}``: at most the fraction ``b`` of the
            blocks keep their activations, and those of the others are computed again.

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
        " blocks that keep their activations, between 0 and 1."
    )


def tiling_config(tiled_mlp: int | None, tiled_loss: int | None) -> TilingConfig:
    """Return what the arguments ``tiled_mlp`` and ``tiled_loss`` of a strategy ask for.

    Args:
        tiled_mlp: Number of tokens that MLPs compute at a time; None: all.
        tiled_loss: Number of tokens for which logits and loss are computed at a time; None: all.

    Raises:
        ValueError: If a number is not a positive integer.
    """
    return TilingConfig(tiled_mlp, tiled_loss)


def refuse_tiling(config: TilingConfig, layout: ParallelLayout, strategy_name: str) -> None:
    """Refuse tiles where layers are split, because such layers exchange tokens, or logits, by themselves.

    Raises:
        ValueError: If both are asked for.
    """
    for name, size, instead in (
        ("tiled_mlp", config.mlp, "sequence_parallel"),
        ("tiled_loss", config.loss, "loss_parallel"),
    ):
        if size is not None and layout.tp > 1:
            raise ValueError(
                f"{strategy_name} with {name}={size} and tp_size={layout.tp}: layers that are split over ranks do not"
                f" work tile by tile. Use tp_size=1, or leave {name} out: {instead} splits the same tensors over tp."
            )
