"""Test the fetcher by which ranks end an epoch together, with exchanges that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader

from lightning_dist.plugins._compat.streams import _AgreeingFetcher


class Stream:
    """Yield numbers, and have their position as state."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.position = index + 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SizedStream(Stream):
    def __len__(self) -> int:
        return 5


def run(own: Stream, of_other: int) -> tuple[list[tuple[int, bool, int]], list[str]]:
    """Fetch an epoch when another rank has ``of_other`` batches.

    Returns:
        Each batch, whether it is known to be the last one, and the saved position; and the beginnings and ends of the
        exchanges and the steps, in order.
    """
    events: list[str] = []

    def begin(index: int, has_batch: bool) -> Callable[[], bool]:
        events.append(f"begin {index}")

        def finish() -> bool:
            events.append(f"finish {index}")
            return has_batch and index < of_other

        return finish

    combined = CombinedLoader([own], "max_size_cycle")
    combined.limits = [float("inf")]
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    agreeing = _AgreeingFetcher(begin, fetcher)
    first = epoch(agreeing, combined, events)
    iter(agreeing)
    assert [entry[:2] for entry in epoch(agreeing, combined, [])] == [entry[:2] for entry in first]
    return first, events


def epoch(fetcher: Any, combined: CombinedLoader, events: list[str]) -> list[tuple[int, bool, int]]:
    seen = []
    for (batch,), index, _ in fetcher:
        events.append(f"step {index}")
        seen.append((batch, fetcher.done, combined._state_dicts()[0]["position"]))
    return seen


@pytest.mark.parametrize(("own", "other", "number"), [(3, 3, 3), (3, 5, 3), (5, 3, 3), (1, 4, 1), (4, 1, 1), (2, 0, 0)])
def test_ranks_end_an_epoch_together_and_know_the_last_batch(own: int, other: int, number: int) -> None:
    seen, _ = run(Stream(own), other)
    expected = [(index, index == number - 1, index + 1) for index in range(number)]
    assert seen == expected


def test_an_exchange_is_finished_one_step_after_it_has_begun() -> None:
    _, events = run(Stream(8), 8)
    for index in range(3, 8):
        begun, finished = events.index(f"begin {index}"), events.index(f"finish {index}")
        assert sum(event.startswith("step") for event in events[begun:finished]) == 1
        assert events.index(f"step {index - 1}") > finished


@pytest.mark.parametrize(("own", "other", "number"), [(5, 5, 5), (5, 3, 3), (3, 5, 3)])
def test_a_length_that_is_too_large_ends_an_epoch_as_in_one_process(own: int, other: int, number: int) -> None:
    seen, _ = run(SizedStream(own), other)
    assert [batch for batch, _, _ in seen] == list(range(number))
    assert [is_last for _, is_last, _ in seen] == [index == 4 for index in range(number)]
