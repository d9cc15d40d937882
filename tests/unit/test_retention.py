"""The retention options decide which checkpoints are kept."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_dist import CheckpointOptions, FullShardStrategy
from lightning_dist.plugins.strategies.retention import Retention


def saved(retention: Retention, steps: list[int], wanted: list[str] | None = None) -> list[str]:
    """Save at these steps, and return the checkpoints that were removed, in order.

    Args:
        retention: Options under test.
        steps: Steps to save at; the path of a checkpoint is its step.
        wanted: Paths that callbacks want to keep.
    """
    removed = []
    for step in steps:
        retention.asked_to_save(str(step), step)
        for path in retention.surplus(wanted or []):
            retention.asked_to_remove(path)
            removed.append(path)
    return removed


def test_the_newest_checkpoints_are_kept() -> None:
    assert saved(Retention(keep_last=2), [1, 2, 3, 4]) == ["1", "2"]


def test_checkpoints_of_every_n_steps_and_those_that_callbacks_want_are_kept() -> None:
    assert saved(Retention(keep_last=1, keep_every_n_steps=3), [1, 2, 3, 4, 5, 6, 7], ["2"]) == ["1", "4", "5"]


def test_a_checkpoint_that_is_saved_again_counts_as_the_newest() -> None:
    retention = Retention(keep_last=2)
    assert saved(retention, [1, 2]) == []
    retention.asked_to_save("1", 3)
    assert saved(retention, [4]) == ["2"]


def test_only_the_checkpoints_of_every_n_steps_are_protected_from_callbacks() -> None:
    retention = Retention(keep_every_n_steps=2)
    assert saved(retention, [1, 2, 3]) == []
    assert [retention.keeps(path) for path in ("1", "2", "3", "other")] == [False, True, False, False]


def test_a_checkpoint_that_a_failed_save_would_have_replaced_is_kept() -> None:
    retention = Retention(keep_last=1)
    assert saved(retention, [1, 2]) == ["1"]
    retention.failed("2")
    assert retention.keeps("1")
    assert saved(retention, [3]) == ["1"]


def test_checkpoints_from_before_a_resume_count() -> None:
    retention = Retention(keep_last=2)
    retention.found({"1": 1, "2": 2})
    assert saved(retention, [3]) == ["1"]


@pytest.mark.parametrize("name", ["keep_last", "keep_every_n_steps"])
def test_options_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint.{name}=0 must be at least 1"):
        CheckpointOptions(**{name: 0})


def test_options_may_be_a_dictionary() -> None:
    assert CheckpointOptions.of({"asynchronous": False}) == CheckpointOptions(asynchronous=False)
    assert CheckpointOptions.of(None) == CheckpointOptions()
    assert FullShardStrategy(checkpoint={"verify": "size"}) is not None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"async": True}, "checkpoint={'async': True} has no option 'async'; did you mean 'asynchronous'? It has"),
        ({"zzz": 1}, "has no option 'zzz'; It has asynchronous, verify"),
        (True, "checkpoint=True: give CheckpointOptions, or a dictionary of asynchronous, verify"),
    ],
)
def test_options_that_do_not_exist_are_refused(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        FullShardStrategy(checkpoint=given)
