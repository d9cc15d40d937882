"""Test that users derive strategies of their own, whose constructors stay as they are written."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from jsonargparse import ArgumentParser

from lightning_dist import FullShardStrategy, TensorParallelStrategy, register_technique
from lightning_dist.parallelize import OPTIONS
from lightning_dist.techniques.options import TechniqueOptions

if TYPE_CHECKING:
    from decimal import Decimal


class OtherDefaults(TensorParallelStrategy):
    def __init__(self, tp_size: int = 1, activation_checkpointing: str = "full", **kwargs: Any) -> None:
        super().__init__(tp_size=tp_size, activation_checkpointing=activation_checkpointing, **kwargs)


class FixedArgument(FullShardStrategy):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dp_shard_size=1, **kwargs)


class NoArguments(FullShardStrategy):
    def __init__(self) -> None:
        super().__init__(dp_shard_size=1)


class NeedsArgument(TensorParallelStrategy):
    def __init__(self, tp_size: int, mine: str, net: Decimal | None = None, **kwargs: Any) -> None:
        super().__init__(tp_size=tp_size, **kwargs)
        self.mine = mine


def created(kind: type, *arguments: str) -> Any:
    """Return the strategy that the command line makes."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=FullShardStrategy | TensorParallelStrategy)
    given = [f"--strategy={kind.__module__}.{kind.__name__}", *arguments]
    return parser.instantiate_classes(parser.parse_args(given)).strategy


def test_the_defaults_of_a_derived_class_win() -> None:
    strategy = created(OtherDefaults, "--strategy.compile=true")
    assert strategy.config.arguments["activation_checkpointing"] == "full"
    assert strategy.config.arguments["compile"] is True
    assert inspect.signature(OtherDefaults).parameters["activation_checkpointing"].default == "full"


def test_arguments_that_a_derived_class_fixes_or_leaves_out_are_not_passed() -> None:
    assert created(FixedArgument, "--strategy.activation_checkpointing=full").config.arguments.recomputes
    assert not created(NoArguments).config.arguments.recomputes


def test_a_derived_class_may_need_arguments_and_names_that_do_not_exist_at_run_time() -> None:
    assert NeedsArgument(1, "yes", compile=True).mine == "yes"


def test_a_technique_may_not_take_the_name_of_an_argument_of_strategies() -> None:
    @dataclass(frozen=True)
    class Late(TechniqueOptions):
        timeout: float = 0.0

    before = list(OPTIONS)
    with pytest.raises(ValueError, match="Late has an argument 'timeout', and so have strategies themselves"):
        register_technique(Late)
    assert before == OPTIONS
