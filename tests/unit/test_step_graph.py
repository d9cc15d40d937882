from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist.tracing.step_graph import Dataflow, InnerCall, Output, PartCall, StepGraph, TraceError, run_on_fakes
from lightning_dist.tracing.step_graph.watched_numbers import watched


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


def with_tensors_taken(*names: str) -> StepGraph:
    inner = [InnerCall(name, 0, Output(), Output(), {0: place}) for place, name in enumerate(names, 1)]
    return StepGraph([PartCall("block", inner=inner)], PartCall("end"), changes_batch=False)


def test_branches_in_which_hooks_take_other_tensors_out_of_a_part_are_refused() -> None:
    with_tensors_taken("block.a").merged_with(with_tensors_taken("block.a"))
    with pytest.raises(TraceError, match="which tensors its forward hooks take out of block"):
        with_tensors_taken("block.a").merged_with(with_tensors_taken("block.b"))


@pytest.mark.parametrize(
    "compute",
    [
        lambda n: bool(n & 1),
        lambda n: ((1 << n) | 1) < 10,
        lambda n: divmod(n, 2)[1] == 1,
        lambda n: pow(n, 2, 5) == 4,
        lambda n: (n ^ 3) + (7 >> n) == 0,
    ],
)
def test_a_use_of_a_watched_number_is_noticed(compute: Callable[[Any], bool]) -> None:
    asked: list[Callable[[], Any]] = []
    value = 3

    def answer(question: Callable[[], Any], result: Any) -> Any:
        asked.append(question)
        return result

    assert compute(watched(value, lambda: value, answer))
    value = 4
    assert [question() for question in asked] == [False]


class Drops(nn.Module):
    """Draw random numbers where no function of the step shows it: in an attention layer, or by gumbel_softmax."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1 if kind == "attention" else 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gumbel":
            return functional.gumbel_softmax(x)
        if self.kind == "scores":
            return functional.scaled_dot_product_attention(x, x, x, None, 0.1)
        attended: Tensor = self.attention(x, x, x)[0]
        return attended


@pytest.mark.parametrize(("kind", "expected"), [("attention", True), ("scores", True), ("gumbel", True), ("no", False)])
def test_random_numbers_are_noticed_wherever_they_are_drawn(kind: str, expected: bool) -> None:
    model = Drops(kind)
    dataflow = Dataflow(frozenset(), model, lambda *args: True)
    x = torch.randn(2, 4, 8)
    assert run_on_fakes(model, lambda fake: model(fake(x)), torch.device("cpu"), dataflow) == ""
    assert dataflow.draws_random == expected
