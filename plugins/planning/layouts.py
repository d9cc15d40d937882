"""List the ways to spread a training over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Layout", "layouts_of"]

_MODEL_AXES = ("tp", "cp", "pp")


@dataclass(frozen=True)
class Layout:
    """Hold the sizes of the axes of a mesh, and further options.

    Args:
        dp_replicate: Number of replicas.
        dp_shard: Number of ranks that share the parameters of a replica.
        tp: Number of ranks that split layers.
        cp: Number of ranks that split sequences.
        pp: Number of ranks of a pipeline.
        options: Further arguments of the strategy and their values, sorted by names.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of all axes."""
        return {axis: getattr(self, axis) for axis in ("dp_replicate", "dp_shard", *_MODEL_AXES)}

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return math.prod(self.sizes.values())

    @property
    def num_data_parallel(self) -> int:
        """Return the number of ranks that have different batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :class:`~lightning_dist.NDParallelStrategy` that this layout sets."""
        sizes = {f"{axis}_size": size for axis, size in self.sizes.items()}
        return {**sizes, **dict(self.options)}

    def having(self, **options: Any) -> Layout:
        """Return the layout with other options besides its own ones, or in place of them."""
        return replace(self, options=tuple(sorted((dict(self.options) | options).items())))

    @property
    def recomputes(self) -> bool:
        """Return whether the backward computes activations of blocks again."""
        return "activation_checkpointing" in dict(self.options)

    def with_few_replicas(self) -> Layout:
        """Return the layout with two replicas in place of more, whose ranks need the same memory."""
        return replace(self, dp_replicate=min(self.dp_replicate, 2))

    @property
    def axes(self) -> str:
        """Return the sizes that are larger than 1, as text."""
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "1 rank"

    def __str__(self) -> str:
        options = " and ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.axes} with {options}" if options else self.axes


def layouts_of(num_nodes: int, num_devices: int, **given: int) -> list[Layout]:
    """Return layouts for a number of devices, beginning with those that send the least.

    Ranks of ``tp`` and ``cp`` are on one node, because they exchange activations in each layer. Of the three axes that
    split a model, at most two are larger than 1. Parameters are shared by no ranks, by those of a node, or by all.
    They have no further options.

    Args:
        num_nodes: Number of nodes.
        num_devices: Number of devices of a node.
        given: Sizes that the layouts have, by the names of axes, which may be others than those above.
    """
    found: dict[Layout, None] = {}
    of_model = sorted(_sizes_of_model(num_nodes, num_devices, given), key=lambda sizes: (math.prod(sizes), sizes))
    for tp, cp, pp in of_model:
        rest = num_nodes * num_devices // (tp * cp * pp)
        within_node = max(num_devices // (tp * cp), 1)
        replicas = given.get("dp_replicate")
        for dp_shard in (1, within_node, rest, given.get("dp_shard", 1), rest // replicas if replicas else 1):
            if rest % dp_shard == 0:
                found[Layout(rest // dp_shard, dp_shard, tp, cp, pp)] = None
    return [layout for layout in found if all(layout.sizes[axis] == size for axis, size in given.items())]


def _sizes_of_model(num_nodes: int, num_devices: int, given: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    num_ranks = num_nodes * num_devices
    powers = [2**exponent for exponent in range(num_ranks.bit_length())]
    for tp, cp, pp in itertools.product(*([given[axis]] if axis in given else powers for axis in _MODEL_AXES)):
        if {"tp", "cp", "pp"} <= given.keys():
            if num_ranks % (tp * cp * pp) == 0:
                yield tp, cp, pp
            continue
        fits = num_devices % (tp * cp) == 0 and num_ranks % (tp * cp * pp) == 0
        if fits and max(tp, cp, pp) <= 8 and sum(size > 1 for size in (tp, cp, pp)) <= 2:
            yield tp, cp, pp
