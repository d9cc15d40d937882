"""Test that a rerun in the backward finds what the forward has found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.model.reruns import StateOfForward
from lightning_dist.parameters.reruns import OtherParameters, UnchangedParameters
from lightning_dist.techniques.activation_checkpointing.block_state import BlockState


class Block(nn.Module):
    """Have an attribute, a small buffer and a large one, and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gain: float | None = 1.0
        self.register_buffer("small", torch.ones(3))
        self.register_buffer("large", torch.ones(200, 200))


def test_what_the_step_has_set_is_undone_in_reruns_alone() -> None:
    block = Block()
    first = block.small
    context = StateOfForward(block).begin()
    block.eval()
    with context():
        pass
    block.train()
    block.gain, block.small, block.later = 2.0, torch.zeros(3), "there"
    block.layer.bias.requires_grad_(False)
    second = block.small
    for _ in range(2):
        with context():
            assert block.small is first
            assert (block.gain, block.training, block.layer.training) == (1.0, False, False)
            assert not hasattr(block, "later")
            assert block.layer.bias.requires_grad
            block.gain = 7.0  # What the rerun sets is dropped.
        assert block.small is second
        assert (block.gain, block.later, block.training, block.layer.training) == (2.0, "there", True, True)
        assert not block.layer.bias.requires_grad


def test_forwards_that_find_the_same_share_what_is_kept() -> None:
    block = Block()
    state = StateOfForward(block)
    kept = []
    for gain in (1.0, 1.0, 2.0):
        block.gain = gain
        with state.begin()():
            kept.append(list(state._last))
    assert all(one is other for one, other in zip(kept[0], kept[1], strict=True))
    assert [one is other for one, other in zip(kept[1], kept[2], strict=True)].count(False) == 1


def test_reruns_have_the_hooks_of_the_forward_in_their_order() -> None:
    block = Block()
    called: list[str] = []
    handles = [block.layer.register_forward_hook(lambda *_, name=name: called.append(name)) for name in "abc"]
    context = StateOfForward(block).begin()
    with context():
        block.layer(torch.ones(3))
    handles[1].remove()
    late = block.layer.register_forward_pre_hook(lambda *_: called.append("d"))
    with context():
        block.layer(torch.ones(3))
    block.layer(torch.ones(3))
    late.remove()
    block.layer(torch.ones(3))
    assert "".join(called) == "abcabcdacac"


def forward(state: BlockState, change: Any = None) -> Any:
    """Run the first context of a forward, in which ``change`` is called, and return the one of its reruns."""
    context = state.begin()
    with context():
        if change is not None:
            change()
    return context


def test_a_small_buffer_has_the_value_of_the_forward() -> None:
    block = Block()
    state = BlockState(block)
    forward(state)
    context = forward(state, lambda: block.small.mul_(3.0))
    block.small.add_(1.0)
    with context():
        assert block.small.tolist() == [1.0, 1.0, 1.0]
        block.small.mul_(3.0)
    assert block.small.tolist() == [4.0, 4.0, 4.0]


def test_a_large_buffer_that_changes_later_is_an_error() -> None:
    block = Block()
    state = BlockState(block)
    forward(state)
    with pytest.raises(
        RuntimeError, match=r"a forward of it has changed the buffer 'large' of a Block.*40,000 elements"
    ):
        forward(state, lambda: block.large.mul_(2.0))
    context = forward(state)
    block.large.add_(1.0)
    with (
        pytest.raises(RuntimeError, match="the step, between a forward and its backward, has changed the buffer"),
        context(),
    ):
        pass


def test_a_large_buffer_that_changes_from_the_first_forward_on_is_copied() -> None:
    block = Block()
    state = BlockState(block)
    context = forward(state, lambda: block.large.mul_(2.0))
    with context():
        assert block.large[0, 0] == 1.0
    assert block.large[0, 0] == 2.0


def group(names: list[str], params: list[Tensor], copies: Any = ()) -> Any:
    return SimpleNamespace(names=names, params=params, copies=lambda: copies)


def test_parameters_of_another_module_are_others() -> None:
    root = nn.ModuleDict({"one": nn.Linear(3, 3, bias=False), "two": nn.Linear(3, 3, bias=False)})
    one, two = (layer.weight for layer in root.values())
    others = OtherParameters(
        root, root["one"], lambda: [group(["one.weight", "two.weight"], [one, two])], lambda *_: False
    )
    assert not others.are_there()
    for held in (two, nn.Parameter(torch.ones(3, 3)), one * 2):
        root["one"].__dict__["_parameters"]["weight"] = held
        assert others.are_there()
    root["one"].__dict__["_parameters"]["weight"] = one
    assert not others.are_there()


def test_a_gathered_parameter_and_one_that_is_tied_are_no_others() -> None:
    root = nn.ModuleDict({"one": nn.Linear(3, 3, bias=False), "two": nn.Linear(3, 3, bias=False)})
    root["two"].weight = root["one"].weight
    shard, gathered = root["one"].weight, nn.Parameter(torch.ones(3, 3))
    groups = [group(["one.weight"], [shard], [("one.weight", gathered, shard)])]
    others = OtherParameters(root, root["two"], lambda: groups, lambda *_: False)
    for held in (shard, gathered):
        root["two"].__dict__["_parameters"]["weight"] = held
        assert not others.are_there()


def test_what_a_technique_has_put_there_is_no_other() -> None:
    root = nn.Sequential(nn.Linear(3, 3))
    part = root[0].weight * 1.0
    root[0].__dict__["_parameters"]["weight"] = part
    owner = root[0]

    def is_form(module: nn.Module, name: str, held: Tensor) -> bool:
        return module is owner and name == "weight" and held is part

    groups = [group(["0.bias"], [root[0].bias])]
    assert not OtherParameters(root, root, lambda: groups, is_form).are_there()
    assert OtherParameters(root, root, lambda: groups, lambda *_: False).are_there()


class OneGroup:
    """Manage one layer as a group that is not gathered does."""

    is_sharded = False

    def __init__(self, layer: nn.Linear) -> None:
        self.names, self.params = ["layer.weight", "layer.bias"], [layer.weight, layer.bias]

    def copies(self) -> list[Any]:
        return []


def test_a_parameter_that_changes_before_a_rerun_is_an_error() -> None:
    block = Block()
    groups: Any = [OneGroup(block.layer)]
    unchanged = UnchangedParameters(block, block, lambda: groups, "tiled_mlp")
    first, second = unchanged.begin(), unchanged.begin()
    for context in (first, second, first):  # What forwards and reruns change themselves is no error.
        with torch.no_grad(), context():
            block.layer.weight.div_(block.layer.weight.norm())
    with torch.no_grad():
        block.layer.bias.add_(1)
    message = r"tiled_mlp: the parameter 'layer.bias' has changed between a forward of Block and its backward"
    with pytest.raises(RuntimeError, match=message), second():
        pass
