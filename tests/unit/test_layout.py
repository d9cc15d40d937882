from __future__ import annotations

import pytest

from lightning_dist import ParallelLayout


@pytest.mark.parametrize(
    ("world_size", "requested", "sizes"),
    [
        (4, {"dp_replicate": 2, "dp_shard": 2}, (2, 2)),
        (4, {"dp_replicate": -1, "dp_shard": 2}, (2, 2)),
        (6, {"dp_replicate": 2, "dp_shard": -1}, (2, 3)),
        (4, {"dp_shard": -1}, (1, 4)),
        (1, {"dp_replicate": 1, "dp_shard": -1}, (1, 1)),
    ],
)
def test_sizes(world_size: int, requested: dict[str, int], sizes: tuple[int, int]) -> None:
    layout = ParallelLayout.resolve(world_size, **requested)
    assert (layout.dp_replicate, layout.dp_shard) == sizes
    assert layout.world_size == layout.num_data_parallel == world_size


@pytest.mark.parametrize(
    ("world_size", "requested", "message"),
    [
        (4, {"dp_replicate": 3, "dp_shard": 2}, "dp_replicate_size=3 x dp_shard_size=2 does not fit 4 .*1x4, 2x2, 4x1"),
        (4, {"dp_replicate": 3, "dp_shard": -1}, "dp_replicate_size=3 x dp_shard_size=-1 does not fit 4"),
        (4, {"dp_replicate": 8, "dp_shard": -1}, "dp_replicate_size=8 x dp_shard_size=-1 does not fit 4"),
        (4, {"dp_replicate": -1, "dp_shard": -1}, "dp_replicate_size and dp_shard_size are both -1"),
        (4, {"dp_replicate": 0, "dp_shard": 4}, "dp_replicate_size=0 must be a positive number"),
        (4, {"dp_replicate": 2, "dp_shard": -2}, "dp_shard_size=-2 must be a positive number"),
        (4, {"dp_replicate": True, "dp_shard": 4}, "dp_replicate_size=True must be a positive number"),
        (4, {"dp_shard": 2, "cp": 2}, "cp_size=2: there is no axis 'cp'"),
        (4, {"dp_shard": -1, "tp": 3}, "dp_shard_size=-1 x tp_size=3 does not fit 4 .* tp_size must be one of 1, 2, 4"),
        (4, {"dp_shard": 1, "tp": 2}, "dp_shard_size=1 x tp_size=2 does not fit 4 .* 1x2, 2x1"),
        (4, {"dp_shard": 2}, "dp_shard_size=2 does not fit 4"),
    ],
)
def test_errors_name_argument_value_and_fix(world_size: int, requested: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout.resolve(world_size, **requested)
