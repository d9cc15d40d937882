from __future__ import annotations

import warnings

import pytest

from lightning_dist import DataParallelStrategy
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallelize import options_from
from lightning_dist.plugins.strategies.checks import warn_of_idle_arguments


@pytest.mark.parametrize("name", ["dp_shard_size", "tp_size", "pp_size"])
def test_sizes_of_other_axes_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=2: data_parallel only has replicas, .* Use strategy='hybrid_shard'"):
        DataParallelStrategy(**{name: 2})


@pytest.mark.parametrize(
    "argument", [{"reshard_after_forward": False}, {"direct_collectives": True}, {"min_num_params": 10}]
)
def test_what_is_about_shards_is_refused_by_name(argument: dict[str, int | bool]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(argument))}=.*: data_parallel shards nothing"):
        DataParallelStrategy(**argument)


def test_arguments_about_shards_are_warned_of_where_the_sizes_leave_nothing_to_shard() -> None:
    arguments = options_from({"min_num_params": 10, "reshard_after_forward": False})
    with pytest.warns(UserWarning, match="min_num_params=10, reshard_after_forward=False has no effect: dp_shard_size"):
        warn_of_idle_arguments(arguments, ParallelLayout(dp_replicate=2))


def test_arguments_about_shards_are_not_warned_of_where_there_are_shards() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_arguments(options_from({"min_num_params": 10}), ParallelLayout(dp_shard=2))
