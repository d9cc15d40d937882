from __future__ import annotations

from lightning_dist.step_graph import PartCall, StepGraph


def graph(steady: set[str], by_batch: set[str]) -> StepGraph:
    return StepGraph(
        [PartCall("block")],
        PartCall("end"),
        changes_batch=False,
        batch_independent_buffers=frozenset(steady),
        batch_buffers=frozenset(by_batch),
    )


def test_a_buffer_is_reset_if_a_branch_changes_it_without_the_batch_and_none_by_the_batch() -> None:
    merged = graph({"block.count", "block.mean"}, set()).merged_with(graph({"block.norm"}, {"block.mean"}))
    assert merged.batch_independent_buffers == {"block.count", "block.norm"}
    assert merged.batch_buffers == {"block.mean"}
