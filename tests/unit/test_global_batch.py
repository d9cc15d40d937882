"""A step's samples, divided anew."""

from __future__ import annotations

import pytest

from lightning_dist.plugins.strategies.global_batch import Batch, rescale_batch


@pytest.mark.parametrize(
    ("total", "configured", "given", "expected"),
    [
        (12, Batch(3, 1, 4), Batch(3, 1, 2), Batch(3, 2, 2)),
        (12, Batch(3, 1, 4), Batch(3, 1, 3), Batch(2, 2, 3)),
        (12, Batch(3, 1, 4), Batch(3, 1, 1), Batch(3, 4, 1)),
        (6, Batch(3, 2, 1), Batch(3, 2, 3), Batch(2, 1, 3)),
        (12, Batch(3, 1, 4), Batch(3, 1, 4), Batch(3, 1, 4)),
        (12, Batch(3, 1, 2), Batch(3, 1, 2), Batch(3, 2, 2)),  # it began on four ranks
        (12, Batch(3, 1, 4), Batch(6, 1, 2), Batch(6, 1, 2)),  # divided by the user
        (12, Batch(3, 1, 4), Batch(5, 1, 2), Batch(5, 1, 2)),  # another step, asked for
    ],
)
def test_a_step_takes_as_many_samples(total: int, configured: Batch, given: Batch, expected: Batch) -> None:
    assert rescale_batch(total, configured, given) == expected


def test_without_accumulation_batches_grow() -> None:
    assert rescale_batch(12, Batch(3, 1, 4), Batch(3, 1, 2), can_accumulate=False) == Batch(6, 1, 2)
    with pytest.raises(ValueError, match="3 on each of 2 ranks, which 2 accumulated"):
        rescale_batch(6, Batch(1, 2, 3), Batch(1, 2, 2), can_accumulate=False)


def test_what_cannot_be_divided_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match=r"takes 12 samples, which 5 ranks cannot .* on 1, 2, 3, 4, 6 or 12 of them"):
        rescale_batch(12, Batch(3, 1, 4), Batch(3, 1, 5))
