"""Define the options of activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from lightning_dist.techniques.activation_checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_dist.techniques.activation_checkpointing.mode import CheckpointingMode, Kind
from lightning_dist.techniques.options import Build, TechniqueOptions, refuse_without_blocks
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = ["CheckpointingOptions"]


@dataclass(frozen=True)
class CheckpointingOptions(TechniqueOptions):
    """Choose which activations of blocks are kept for the backward.

    Args:
        activation_checkpointing: Which activations of blocks are kept for the backward. ``"none"`` (or False): all of
            them. ``"full"`` (or True): none; a block runs again in the backward. ``"selective"``: the results of
            attention and of every second matrix product; the others are computed again. ``{"every": k}``: those of all
            but every ``k``-th block. ``{"budget": b}``: those of at most the fraction ``b`` of the blocks, spread
            evenly; the other blocks run again. ``"offload"``: all of them, in the memory of the CPU.

    Raises:
        ValueError: If the value is none of these.
    """

    activation_checkpointing: bool | str | dict[str, float] = False

    def __post_init__(self) -> None:
        _ = self.mode

    @property
    def mode(self) -> CheckpointingMode:
        """Return what the argument asks for.

        Raises:
            ValueError: If it is none of the accepted values.
        """
        names, value = get_args(Kind), self.activation_checkpointing
        if isinstance(value, bool):
            return CheckpointingMode("full" if value else "none")
        if isinstance(value, str) and value in names:
            return CheckpointingMode(value)  # type: ignore[arg-type]
        if isinstance(value, Mapping) and len(value) == 1:
            key, number = next(iter(value.items()))
            if key == "every" and number >= 1 and number == int(number):
                return CheckpointingMode("full", every=int(number))
            if key == "budget" and 0 <= number <= 1:
                return CheckpointingMode("none" if number == 1 else "full", budget=number)
        raise ValueError(
            f"activation_checkpointing={value!r} must be one of {', '.join(map(repr, names))}, True (as 'full'), False"
            " (as 'none'), {'every': k} with a number of blocks k of at least 1, or {'budget': b} with the fraction b"
            " of the blocks that keep their activations, between 0 and 1."
        )

    is_for_training = True

    @property
    def recomputes(self) -> bool:  # type: ignore[override]
        """Return whether activations of blocks are not simply kept."""
        return bool(self.mode)

    def compared(self) -> Mapping[str, Any]:
        """Return the mode in place of the argument, which has several spellings."""
        return {"activation_checkpointing": self.mode}

    def memory_traits(self, device: torch.device) -> Mapping[str, bool]:
        """Return whether blocks run again."""
        return {"recomputes": self.mode.kind == "full"}

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the mode with its numbers as text."""
        mode = self.mode
        default = vars(CheckpointingMode(mode.kind))
        options = [f"{key}={value}" for key, value in vars(mode).items() if value != default[key]]
        return {"activation_checkpointing": " ".join([mode.kind, *options]) if mode else None}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique unless all activations are kept."""
        if self.mode:
            refuse_without_blocks("activation_checkpointing", build)
            yield ActivationCheckpointing(self.mode, build.units)
