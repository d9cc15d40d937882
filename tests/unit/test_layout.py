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
def test_sizes_of_minus_one_are_resolved(world_size: int, requested: dict[str, int], sizes: tuple[int, int]) -> None:
    layout = ParallelLayout.resolve(world_size, **requested)
    assert (layout.dp_replicate, layout.dp_shard) == sizes
    assert layout.world_size == layout.num_data_parallel == world_size


@pytest.mark.parametrize(
    ("world_size", "requested", "message"),
    [
        (4, {"dp_replicate": 3, "dp_shard": 2}, "dp_replicate_size=3 x dp_shard_size=2 does not fit 4 .*1x4, 2x2, 4x1"),
        (4, {"dp_replicate": 3, "dp_shard": -1}, "^dp_replicate_size=3 does not fit 4 .* must be one of 1, 2, 4.$"),
        (
            4,
            {"dp_replicate": -1, "dp_shard": 3},
            "^dp_shard_size=3 does not fit 4 .* dp_shard_size must be one of 1, 2, 4.$",
        ),
        (
            4,
            {"dp_replicate": 3, "dp_shard": 2, "tp": -1},
            "the product of dp_replicate_size and dp_shard_size must be one",
        ),
        (4, {"dp_replicate": -1, "dp_shard": -1}, "dp_replicate_size and dp_shard_size are both -1"),
        (4, {"dp_replicate": 0, "dp_shard": 4}, "dp_replicate_size=0 must be a positive number"),
        (4, {"dp_replicate": 2, "dp_shard": -2}, "dp_shard_size=-2 must be a positive number"),
        (4, {"dp_replicate": True, "dp_shard": 4}, "dp_replicate_size=True must be a positive number"),
        (4, {"dp_shard": 2, "xp": 2}, "xp_size=2: there is no axis 'xp'"),
        (4, {"dp_shard": -1, "tp": 3}, "^tp_size=3 does not fit 4 .* tp_size must be one of 1, 2, 4"),
        (
            4,
            {"dp_shard": 1, "tp": 2},
            "dp_shard_size=1 x tp_size=2 does not fit 4 .* dp_shard_size must be 2, or -1 for it",
        ),
        (
            4,
            {"dp_shard": 2},
            "dp_shard_size=2 does not fit 4 .* must be 4, or -1 for it. .* use strategy='hybrid_shard'",
        ),
        (4, {"dp_replicate": 3}, "dp_replicate_size=3 does not fit 4 .* dp_replicate_size must be 4, or -1"),
    ],
)
def test_the_error_of_a_wrong_size_names_argument_value_and_fix(
    world_size: int, requested: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout.resolve(world_size, **requested)


def test_coordinates_and_groups_of_ranks_follow_from_the_order_of_the_axes() -> None:
    layout = ParallelLayout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert layout.coordinates(13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 1}
    assert [layout.data_parallel_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert layout.ranks_over(["pp"]) == [[rank, rank + 8] for rank in range(8)]
    assert layout.ranks_over(["dp_replicate", "dp_shard"])[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.ranks_over(["pp", "tp"])[0] == [0, 1, 8, 9]
    assert layout.ranks_over(["dp_replicate", "dp_shard", "tp"]) == [list(range(8)), list(range(8, 16))]


def test_ranks_that_split_a_sequence_share_a_batch_and_parameters() -> None:
    layout = ParallelLayout(dp_replicate=2, dp_shard=2, cp=2)
    assert layout.num_data_parallel == 4 and layout.num_shards == 4
    assert [layout.data_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.ranks_over(["cp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_experts_are_distributed_over_a_part_of_the_ranks_that_share_parameters() -> None:
    layout = ParallelLayout.resolve(16, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2)
    assert layout.world_size == 16 and layout.num_shards == 4
    assert layout.ranks_over(["ep"])[:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.ranks_over(["dp_shard", "ep"])[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.describe()["ep_size"] == 2
    with pytest.raises(ValueError, match=r"ep_size=3 does not divide dp_shard_size=2 x cp_size=2, .* one of 1, 2, 4"):
        ParallelLayout(dp_shard=2, cp=2, ep=3)


def test_the_error_of_a_missing_mesh_names_the_argument_that_creates_it() -> None:
    class OneAxis:
        mesh_dim_names = ("dp_shard",)

    with pytest.raises(ValueError, match="has no mesh of the axis 'tp': set tp_size to more than 1"):
        ParallelLayout(dp_shard=2).get_mesh(OneAxis(), "tp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="There is no axis 'xp'; the axes are pp, dp_replicate, dp_shard, cp, tp"):
        ParallelLayout(dp_shard=2).get_mesh(OneAxis(), "xp")  # type: ignore[arg-type]
