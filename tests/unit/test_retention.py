"""Which checkpoints stay."""

from __future__ import annotations

import pytest

from lightning_dist import CheckpointOptions
from lightning_dist.plugins.strategies.retention import Retention


def saved(retention: Retention, steps: list[int], wanted: list[str] | None = None) -> list[str]:
    """Save at these steps; what went, in order."""
    gone = []
    for step in steps:
        retention.asked_to_save(str(step), step)
        for path in retention.surplus(wanted or []):
            retention.asked_to_remove(path)
            gone.append(path)
    return gone


def test_the_newest_stay() -> None:
    assert saved(Retention(keep_last=2), [1, 2, 3, 4]) == ["1", "2"]


def test_milestones_and_what_callbacks_want_stay() -> None:
    assert saved(Retention(keep_last=1, keep_every_n_steps=3), [1, 2, 3, 4, 5, 6, 7], ["2"]) == ["1", "4", "5"]


def test_what_is_saved_again_is_the_newest() -> None:
    retention = Retention(keep_last=2)
    assert saved(retention, [1, 2]) == []
    retention.asked_to_save("1", 3)
    assert saved(retention, [4]) == ["2"]


def test_a_callback_cannot_remove_what_is_kept() -> None:
    retention = Retention(keep_every_n_steps=2)
    assert saved(retention, [1, 2, 3]) == []
    assert [retention.keeps(path) for path in ("1", "2", "3", "other")] == [False, True, False, False]


def test_what_was_to_go_for_a_save_that_failed_comes_back() -> None:
    retention = Retention(keep_last=1)
    assert saved(retention, [1, 2]) == ["1"]
    retention.failed("2")
    assert retention.keeps("1")
    assert saved(retention, [3]) == ["1"]


def test_those_from_before_a_resume_count() -> None:
    retention = Retention(keep_last=2)
    retention.found({"1": 1, "2": 2})
    assert saved(retention, [3]) == ["1"]


@pytest.mark.parametrize("name", ["keep_last", "keep_every_n_steps"])
def test_less_than_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint.{name}=0 must be at least 1"):
        CheckpointOptions(**{name: 0})
