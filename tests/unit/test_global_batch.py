"""The samples of a step are divided anew when the number of ranks changes."""

from __future__ import annotations

import pytest

from lightning_dist.plugins.global_batch import Batch, rescale_batch


@pytest.mark.parametrize(
    ("total", "configured", "given", "expected"),
    [
        (12, Batch(3, 1, 4), Batch(3, 1, 2), Batch(3, 2, 2)),
        (12, Batch(3, 1, 4), Batch(3, 1, 3), Batch(2, 2, 3)),
        (12, Batch(3, 1, 4), Batch(3, 1, 1), Batch(3, 4, 1)),
        (6, Batch(3, 2, 1), Batch(3, 2, 3), Batch(2, 1, 3)),
        (12, Batch(3, 1, 4), Batch(3, 1, 4), Batch(3, 1, 4)),
        (12, Batch(3, 1, 2), Batch(3, 1, 2), Batch(3, 2, 2)),  # The run began on four ranks.
        (12, Batch(3, 1, 4), Batch(6, 1, 2), Batch(6, 1, 2)),  # The user has divided the samples already.
        (12, Batch(3, 1, 4), Batch(5, 1, 2), Batch(5, 1, 2)),  # The user asks for another number of samples.
    ],
)
def test_a_step_takes_as_many_samples_as_before(total: int, configured: Batch, given: Batch, expected: Batch) -> None:
    assert rescale_batch(total, configured, given) == expected


def test_without_accumulation_the_batches_grow_or_the_number_of_ranks_is_refused() -> None:
    assert rescale_batch(12, Batch(3, 1, 4), Batch(3, 1, 2), can_accumulate=False) == Batch(6, 1, 2)
    with pytest.raises(ValueError, match="3 on each of 2 ranks, which 2 accumulated"):
        rescale_batch(6, Batch(1, 2, 3), Batch(1, 2, 2), can_accumulate=False)


def test_a_number_of_ranks_that_cannot_divide_the_samples_is_refused_with_those_that_can() -> None:
    with pytest.raises(ValueError, match=r"takes 12 samples, which 5 ranks cannot .* on 1, 2, 3, 4, 6 or 12 of them"):
        rescale_batch(12, Batch(3, 1, 4), Batch(3, 1, 5))
