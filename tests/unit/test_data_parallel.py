from __future__ import annotations

import pytest

from lightning_dist import DataParallelStrategy


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
