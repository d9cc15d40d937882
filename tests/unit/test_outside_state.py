"""Test that hooks inside of a block which runs again leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.techniques.activation_checkpointing.outside_state import OutsideState

SEEN: list[float] = []


class Recorder:
    """Count in attributes, a dictionary of lists and a tensor."""

    def __init__(self) -> None:
        self.calls, self.kept, self.total = 0, {"": [0.0]}, torch.zeros(())

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1
        self.kept[""].append(float(output.sum()))
        self.total += output.detach().sum()

    def state(self) -> Any:
        return self.calls, list(self.kept[""]), float(self.total), id(self.total)


class Root(nn.Module):
    """Hold a block, and what hooks inside of it count."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self._calls, self.kept = 0, [0.0]
        self.register_buffer("sum", torch.zeros(()))
        self.other = 0

    def count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._calls += 1
        self.kept.append(float(output.sum()))
        self.sum += output.detach().sum()

    def state(self) -> Any:
        return self._calls, list(self.kept), float(self.sum), id(self.sum)


def by_closure() -> tuple[Callable[..., None], Callable[[], Any]]:
    """Return a hook that counts in variables of this function, and a function that returns them."""
    calls, kept = 0, {}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += 1
        kept[calls] = float(output.sum())

    return hook, lambda: (calls, dict(kept))


def append_to(target: list[float], module: nn.Module, args: Any, output: Tensor) -> None:
    target.append(float(output.sum()))


def append_globally(module: nn.Module, args: Any, output: Tensor) -> None:
    SEEN.append(float(output.sum()))


def make_hook(kind: str, root: Root) -> tuple[Callable[..., None], Callable[[], Any]]:
    if kind == "object":
        recorder = Recorder()
        return recorder, recorder.state
    if kind == "method":
        return root.count, root.state
    if kind == "lambda":
        return lambda *args: root.count(*args), root.state
    if kind == "closure":
        return by_closure()
    if kind == "partial":
        target: list[float] = []
        return partial(append_to, target), target.copy
    return append_globally, SEEN.copy


@pytest.mark.parametrize("kind", ["object", "method", "lambda", "closure", "partial", "global"])
def test_what_a_hook_changes_in_a_rerun_is_dropped(kind: str) -> None:
    root = Root()
    hook, state = make_hook(kind, root)
    root.block[0].register_forward_hook(hook)
    holder = OutsideState(root.block)
    x = torch.ones(2)
    first, second = holder.begin(), holder.begin()
    found = []
    for context in (first, second):
        found.append(state())
        with context():
            root.block(x)
    after = state()
    root.other = 1
    for context in (second, first, second):
        before = state()
        assert before == after
        with context():
            if kind != "partial":
                assert state()[0:2] == found[0 if context is first else 1][0:2]
            root.block(x)
        assert state() == after
    assert root.other == 1


GLOBAL: list[float] = []


def note(value: float) -> None:
    GLOBAL.append(value)


class Counts(nn.Module):
    """Append to a global list by a method of a subclass, and to a list of the class, and count in a variable."""

    kept: list[float] = []
    note: Callable[[float], None]

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.note(float(x.sum()))
        self.kept.append(float(x.sum()))
        return x


def test_what_a_forward_changes_outside_of_its_block_is_dropped_in_a_rerun() -> None:
    calls = 0

    class Closure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x * calls

    class Notes(Counts):
        def note(self, value: float) -> None:
            any(note(some) for some in [value])

    block = nn.Sequential(Notes(), Closure())
    state = OutsideState(block)
    context = state.begin()
    with context():
        first = block(torch.ones(2))
    with state.begin()():
        block(torch.ones(2))
    with context():
        assert torch.equal(block(torch.ones(2)), first)
    assert (GLOBAL, Counts.kept, calls) == ([2.0, 2.0], [2.0, 2.0], 2)


def test_a_block_without_hooks_costs_nothing() -> None:
    holder = OutsideState(nn.Sequential(nn.Linear(2, 2)))
    assert holder.begin() is holder.begin()
