"""Define the options of tiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_dist.techniques.options import Arguments, Build, Run, TechniqueOptions
from lightning_dist.techniques.protocol import Technique
from lightning_dist.techniques.tiling.planner import find_tiling_plan
from lightning_dist.techniques.tiling.tiling import Tiling

__all__ = ["TilingOptions"]


@dataclass(frozen=True)
class TilingOptions(TechniqueOptions):
    """Choose what is computed a few tokens at a time.

    Args:
        tiled_mlp: Number of tokens of a sequence that the MLPs of blocks compute at a time, and again in the backward,
            so that long sequences take less memory. None: all tokens at once.
        tiled_loss: Number of tokens of a sequence for which logits and ``F.cross_entropy`` are computed at a time, and
            again in the backward, so that logits are never whole. None: all tokens at once.

    Raises:
        ValueError: If a number of tokens is not a positive integer.
    """

    tiled_mlp: int | None = None
    tiled_loss: int | None = None

    def __post_init__(self) -> None:
        for name, size in self.given().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a number of tokens of at least 1, such as 2048, or None.")

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse tiles where layers are split, because such layers exchange tokens, or logits, by themselves."""
        instead = {"tiled_mlp": "sequence_parallel", "tiled_loss": "loss_parallel"}
        for name, size in self.given().items() if run.layout.tp > 1 else ():
            raise ValueError(
                f"{run.strategy} with {name}={size} and tp_size={run.layout.tp}: layers that are split over ranks do"
                f" not work tile by tile. Use tp_size=1, or leave {name} out: {instead[name]} splits the same tensors"
                " over tp."
            )

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Find what can be tiled, or take over the plan of the module that this one is a copy of."""
        if not self.given():
            return
        original = None if build.copied is None else build.copied.get(Tiling)
        plan = (
            find_tiling_plan(
                build.module, build.units, self.tiled_mlp, self.tiled_loss, build.steps.whole(), build.device
            )
            if original is None
            else original.plan
        )
        yield Tiling(self.tiled_mlp, self.tiled_loss, plan)
