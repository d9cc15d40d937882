"""What a rank computes and keeps at the start does not grow with the number of ranks."""

from __future__ import annotations

import pytest

from tests.growth.measure import set_up, stop_requests


@pytest.mark.alone
@pytest.mark.parametrize(("layout", "num_groups"), [("full_shard", 3), ("hybrid_shard", 5)])
def test_a_model_is_set_up_for_many_ranks_in_two_seconds(layout: str, num_groups: int) -> None:
    few, many = set_up(64, layout), set_up(16_384, layout)
    assert many["seconds"] <= 2.0  # full_shard took 6.5 s when it made tensors for all ranks.
    assert many["mib"] - few["mib"] <= 200
    assert few["groups"] == many["groups"] == num_groups


@pytest.mark.parametrize("num_ranks", [8, 16_384])
def test_a_request_to_stop_is_one_word_for_each_step(num_ranks: int) -> None:
    assert stop_requests(num_ranks) == {"messages": 1, "bytes": 8}
