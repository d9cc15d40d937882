"""Code of a split module reads the sizes of a rank's part, and nothing else does."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.model.configurations import configured_values, with_attribute
from lightning_dist.techniques.tensor_parallel.own_width import read_own_width


class Norm(nn.Module):
    """Record the width that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[-1]
        return x * 2


class Reader(nn.Module):
    """Return the widths that it reads of its input, of its norm's output, and of other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fails = Norm(), False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> list[Any]:
        if self.fails:
            raise RuntimeError("fails")
        b, t, c = x.shape
        h = self.norm(x)
        found = [c, x.size(2), x.size(-1), x.size(dim=2), x.shape[-1], x.to(torch.float64).shape[-1], h.size(-1)]
        assert (b, t, x.size(1), x.size(0)) == (2, 3, 3, 2)
        return [*found, None if mask is None else mask.shape[-1], x.transpose(0, 1).reshape(-1).numel()]


OWN = [4] * 7


@pytest.fixture
def reader() -> Reader:
    module = Reader()
    read_own_width(module, ("x",), 2, lambda: module.norm.training is False)
    return module


@pytest.mark.parametrize("by_name", [False, True])
def test_a_module_reads_the_width_of_its_part(reader: Reader, by_name: bool) -> None:
    x, mask = torch.ones(2, 3, 8), torch.ones(3, 8)
    found = reader(mask=mask, x=x) if by_name else reader(x, mask)
    assert found == [*OWN, 8, 48]  # The mask has the same size by chance.
    assert reader.norm.width == 8 and x.shape[-1] == 8


def test_sizes_are_whole_where_the_module_is(reader: Reader) -> None:
    reader.norm.eval()
    assert reader(torch.ones(2, 3, 8)) == [8] * 7 + [None, 48]


def test_an_error_does_not_change_what_is_read_later(reader: Reader) -> None:
    reader.fails = True
    with pytest.raises(RuntimeError, match="fails"):
        reader(torch.ones(2, 3, 8))
    reader.fails = False
    handle = reader.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reader(torch.ones(2, 3, 8))
    handle.remove()
    assert reader(torch.ones(2, 3, 8)) == [*OWN, None, 48]


def test_hooks_inside_see_whole_sizes() -> None:
    module, seen = Reader(), []
    module.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    module.norm.register_forward_hook(lambda _, args, output: seen.append(args[0].shape[-1] + output.shape[-1]))
    read_own_width(module, ("x",), 2, lambda: False)
    module(torch.ones(2, 3, 8))
    assert seen == [8, 16]


@dataclass(frozen=True)
class Frozen:
    width: int = 8
    n_head: int = 4

    @property
    def head_dim(self) -> int:
        return self.width // self.n_head


class Configured(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.args, self.other = config, {"n_head": 4}, config


def test_a_configuration_has_another_value_for_one_module() -> None:
    config = Frozen()
    view = with_attribute(with_attribute(config, "n_head", 2), "width", 4)
    assert (view.n_head, view.width, view.head_dim) == (2, 4, 2) and isinstance(view, Frozen)
    assert (config.n_head, config.width) == (4, 8)
    assert copy.deepcopy(view).n_head == 2
    assert dict(configured_values(Configured(config))) == {"config.width": 8, "config.n_head": 4}


def test_other_values_of_a_configuration_stay_those_of_all() -> None:
    config = Namespace(n_head=4, dropout=0.1)
    view = with_attribute(config, "n_head", 2)
    config.dropout = 0.5
    view.scale = 3
    assert (view.dropout, view.n_head, config.scale, config.n_head) == (0.5, 2, 3, 4)


class Final:
    """Refuse classes that derive from it."""

    def __init__(self) -> None:
        self.n_head = 4

    def __init_subclass__(cls) -> None:
        raise RuntimeError("no classes")


def test_a_configuration_that_cannot_be_seen_otherwise_is_an_error() -> None:
    with pytest.raises(TypeError, match="A Final cannot be seen with another n_head: no classes"):
        with_attribute(Final(), "n_head", 2)
