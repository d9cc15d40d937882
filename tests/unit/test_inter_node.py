"""Bytes between nodes are those of the axes whose groups lie on several nodes."""

from __future__ import annotations

import pytest

from lightning_dist import ParallelLayout
from lightning_dist.plugins.callbacks.telemetry.nodes import inter_node_mib

METRICS = {f"comm/{axis}_mib_per_step": float(mib) for axis, mib in (("dp_replicate", 8), ("dp_shard", 4), ("pp", 2))}


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node", "expected"),
    [
        ({"dp_replicate": 2, "dp_shard": 4}, 4, 8.0),
        ({"dp_replicate": 2, "dp_shard": 4}, 2, 8.0 + 4.0 * 2 / 4),
        ({"dp_shard": 8}, 4, 4.0 * 2 / 8),
        ({"pp": 4, "dp_shard": 2}, 4, 2.0 * 1 / 3),
        ({"pp": 2, "dp_shard": 2}, 4, 0.0),
    ],
)
def test_bytes_of_axes_inside_a_node_are_left_out(sizes: dict[str, int], ranks_per_node: int, expected: float) -> None:
    layout = ParallelLayout(**sizes)
    assert inter_node_mib(METRICS, layout, ranks_per_node) == pytest.approx(expected)
