"""Find the parts of a model: the modules whose calls run on one stage only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from lightning_dist.tracing.step_graph.control_flow import run_all_branches
from lightning_dist.tracing.step_graph.errors import EndOfTraceError, TraceError

__all__ = ["find_parts"]


def find_parts(
    root: nn.Module,
    step: Callable[..., Any],
    device: torch.device,
    blocks: Mapping[str, nn.Module],
    num_wanted: int,
    is_first_pass_only: bool = False,
) -> list[str]:
    """Return the names of the parts of ``root``, in the order of their first calls.

    The parts are the blocks, and outside of them the outermost modules that have parameters and contain no blocks. An
    ``nn.Sequential`` is replaced by its children. While there are fewer parts than wanted, the largest part that is not
    a block and has several children with parameters is replaced by these children.

    Args:
        root: The user's module, on any device; it is unchanged afterwards.
        step: Function that runs the step, as for :func:`trace_step`.
        device: Device that the fake tensors pretend to be on.
        blocks: The repeated blocks of the model, by full name.
        num_wanted: Number of parts to reach; the result has fewer if the model cannot be divided further.
        is_first_pass_only: Whether the step is run only until it calls a block for the second time.

    Raises:
        TraceError: If the step does not run on fake tensors, or calls no module with parameters.
    """
    tree = next(
        run_all_branches(partial(_CallTree, frozenset(blocks), is_first_pass_only), root, step, device)
    ).observer
    parts = _divided(root, tree, blocks, num_wanted)
    if not parts:
        raise TraceError(
            "The step calls no module with parameters, so there is nothing to split into stages: call the model in it,"
            " by `self(...)` or `self.model(...)`."
        )
    return parts


def _divided(root: nn.Module, tree: _CallTree, blocks: Mapping[str, nn.Module], num_wanted: int) -> list[str]:
    """Return the names of the parts for :func:`find_parts`, given which modules the step calls inside of each other."""
    modules = dict(root.named_modules())
    with_blocks = {name.rpartition(".")[0] for name in blocks}
    with_blocks |= {parent for name in with_blocks for parent in _parents(name)}

    def has_params(name: str) -> bool:
        return any(True for _ in modules[name].parameters())

    def inside(name: str) -> list[str]:
        return [child for child in tree.children[name] if has_params(child)]

    parts: list[str] = []

    def visit(name: str) -> None:
        if name in blocks or (name not in with_blocks and not isinstance(modules[name], nn.Sequential)):
            if name not in parts:
                parts.append(name)
        else:
            for child in inside(name):
                visit(child)

    for name in inside(""):
        visit(name)
    while len(parts) < num_wanted:
        divisible = [name for name in parts if name not in blocks and len(inside(name)) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda name: sum(param.numel() for param in modules[name].parameters()))
        index = parts.index(largest)
        parts[index : index + 1] = [child for child in inside(largest) if child not in parts]
    return parts


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


class _CallTree:
    """Observe a step, and record which modules each module calls.

    Args:
        blocks: The names of the model's repeated blocks.
        is_first_pass_only: Whether to end the step when it calls a block for the second time.
    """

    def __init__(self, blocks: frozenset[str], is_first_pass_only: bool = False) -> None:
        self._blocks = blocks
        self._is_first_pass_only = is_first_pass_only
        self._called: set[str] = set()
        self.functions: TorchFunctionMode = BaseTorchFunctionMode()
        self.children: dict[str, list[str]] = defaultdict(list)
        self._running = [""]
        self._num_calls = 0

    def count_calls(self) -> int:
        """Return how many calls of blocks have begun."""
        return self._num_calls

    def is_between(self) -> bool:
        """Return True, because the outcome of any decision may matter as long as the parts are not known."""
        return True

    def on_input(self, tensor: Tensor) -> None:
        pass

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self._blocks and name in self._called and self._is_first_pass_only:
            raise EndOfTraceError
        self._called.add(name)
        if name not in self.children[self._running[-1]]:
            self.children[self._running[-1]].append(name)
        self._running.append(name)
        self._num_calls += name in self._blocks

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        while self._running.pop() != name:  # Modules that raised are on the stack, but never return.
            pass

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_next(self, name: str) -> None:
        pass

    def on_end(self, result: Any) -> None:
        pass
