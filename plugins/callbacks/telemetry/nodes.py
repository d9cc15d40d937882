"""Compute how much of what ranks send crosses the links between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from lightning_dist.mesh.layout import ParallelLayout

__all__ = ["inter_node_mib"]


def inter_node_mib(metrics: Mapping[str, float], layout: ParallelLayout, ranks_per_node: int) -> float:
    """Return the MiB that a rank sends to other nodes in a step, the mean over the ranks.

    Along an axis, ranks are taken to send to the next one of their group, in a ring except between stages. The share
    of these pairs whose ranks are on two nodes is the share of the axis's bytes that crosses links between nodes.

    Args:
        metrics: Figures by name, of which ``comm/<axis>_mib_per_step`` are read.
        layout: The sizes of the mesh's axes.
        ranks_per_node: Number of ranks of each node, whose global ranks follow each other.
    """
    return sum(
        metrics.get(f"comm/{axis}_mib_per_step", 0.0) * _crossing(layout.ranks_over([axis]), ranks_per_node, axis)
        for axis, size in {**layout.sizes, "ep": layout.ep}.items()
        if size > 1
    )


def _crossing(groups: Sequence[Sequence[int]], ranks_per_node: int, axis: str) -> float:
    """Return the fraction of the pairs of ranks that send to each other that are on two nodes."""
    pairs = [pair for group in groups for pair in pairwise(group if axis == "pp" else [*group, group[0]])]
    return sum(first // ranks_per_node != second // ranks_per_node for first, second in pairs) / len(pairs)
