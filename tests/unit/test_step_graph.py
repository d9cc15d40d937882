from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist.tracing.step_graph import (
    Dataflow,
    InnerCall,
    Output,
    PartCall,
    StepGraph,
    TraceError,
    Undone,
    run_on_fakes,
)
from lightning_dist.tracing.step_graph.changes_after_parts import ChangesAfterParts
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


def test_what_is_computed_with_a_number_that_is_made_up_is_made_up() -> None:
    def answer(question: Callable[[], Any], result: Any) -> str:
        return "made up"

    def other(question: Callable[[], Any], result: Any) -> Any:
        raise AssertionError("it was asked as if it were known")

    made_up, known = watched(1.0, None, answer), watched(2.0, lambda: 2.0, other)
    for number in (0.9 * known + 0.1 * made_up, made_up / known, known**made_up, divmod(known, made_up)[1]):
        assert (number > 0, abs(number) < known, known < number) == ("made up",) * 3


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


def changes(change: Callable[[nn.Module], Any], undo: Callable[[nn.Module, Any], Any]) -> ChangesAfterParts:
    """Return what is found of a step that changes a module in the first part, calls the parts, and undoes it."""
    root = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    found = ChangesAfterParts(root, ["0", "1"])
    module = root[0][0]
    found.begin()
    changed = change(module)
    for part in ("0", "1"):
        found.before_part()
        found.on_return(part)
    undo(module, changed)
    found.end()
    return found


def test_what_a_step_undoes_in_a_part_is_named() -> None:
    def hook(module: nn.Module) -> Any:
        return module.register_forward_pre_hook(lambda *_: None)

    assert changes(hook, lambda module, handle: handle.remove()).undone == Undone(hooks=("0.0",))
    found = changes(lambda module: module.eval(), lambda module, _: module.train())
    assert (found.undone, found.left) == (Undone((("0.0", "training"),)), {})

    def put(module: nn.Module) -> Tensor:
        before = module.running_mean
        module.running_mean = torch.ones(2)
        return before

    found = changes(put, lambda module, before: setattr(module, "running_mean", before))
    assert (found.undone, found.left) == (Undone(buffers=(("0.0", "running_mean"),)), {})


def test_what_a_step_leaves_in_a_part_after_its_call_is_named() -> None:
    found = changes(lambda module: None, lambda module, _: module.running_mean.add_(1))
    assert (found.undone, found.left) == (Undone(), {"0": "0.0.running_mean"})
    found = changes(lambda module: None, lambda module, _: setattr(module, "seen", 3))
    assert (found.undone, found.left) == (Undone(), {"0": "0.0.seen"})
    found = changes(lambda module: module.running_mean.add_(1), lambda module, _: None)
    assert (found.undone, found.left) == (Undone(), {})


def test_what_both_branches_undo_is_undone() -> None:
    one, other = Undone((("a", "x"),), (), ("h",)), Undone((("a", "x"), ("b", "y")), (("c", "z"),), ())
    assert one | other == Undone((("a", "x"), ("b", "y")), (("c", "z"),), ("h",))
