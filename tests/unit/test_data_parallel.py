from __future__ import annotations

import pytest

from lightning_dist import DataParallelStrategy


@pytest.mark.parametrize("name", ["dp_shard_size", "tp_size", "pp_size"])
def test_sizes_of_other_axes_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=2: data_parallel only has replicas, .* Use strategy='hybrid_shard'"):
        DataParallelStrategy(**{name: 2})
