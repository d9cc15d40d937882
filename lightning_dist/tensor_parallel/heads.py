"""Tensors with a dimension of attention heads that enter and leave a module in which each rank has heads of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.tensor_parallel import exchanges
from lightning_dist.tensor_parallel.plan import SplitHeads
from lightning_dist.tracing import tensors_in

__all__ = ["add_head_hooks"]

DIM = -3
"""Heads lie along that dimension of attention scores: ``(..., heads, queries, keys)``."""


def add_head_hooks(module: nn.Module, plan: SplitHeads, group: dist.ProcessGroup, is_off: Callable[[], bool]) -> None:
    """Give ``module`` this rank's heads of what it is given, and let it return all heads.

    A tensor that it returns as it was given, such as a position bias that one block hands on to the next, is not
    gathered again.

    Args:
        module: The module; its layers are split.
        plan: Which of its tensors have heads.
        group: The ranks of ``tp``.
        is_off: Whether the module has all heads now.
    """
    entered: list[tuple[Tensor, Tensor]] = []  # this rank's heads, and all of them

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered.clear()
        if is_off():
            return None
        given, named = list(args), dict(kwargs)
        for key in plan.arguments:
            holder: Any = given if isinstance(key, int) else named
            value = holder[key] if not isinstance(key, int) or key < len(given) else None
            if isinstance(value, Tensor):
                holder[key] = _own_heads(value, plan.num_heads, group)
                entered.append((holder[key], value))
        return tuple(given), named

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if is_off():
            return None
        result = _with_all_heads(output, plan.outputs, entered, group)
        entered.clear()
        return result

    # torch.compile would trace into them, and is no faster for it: collectives end a graph.
    disable = cast(Callable[[Any], Any], torch.compiler.disable)
    module.register_forward_pre_hook(disable(enter), with_kwargs=True)
    module.register_forward_hook(disable(leave))


def _own_heads(tensor: Tensor, num_heads: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's heads of a tensor, which has all of them once, or for each sample."""
    size = tensor.size(DIM)
    per_sample = tensor.unflatten(DIM, (size // num_heads, num_heads))  # type: ignore[no-untyped-call]
    own = exchanges.split(per_sample, group, DIM) if tensor.requires_grad else _part(per_sample, group)
    return own.flatten(DIM - 1, DIM)


def _part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), DIM)[group.rank()]


def _with_all_heads(
    output: Any, indices: tuple[int, ...], entered: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> Any:
    """Return what a module returns, with all heads in the tensors of ``indices``."""
    number = -1

    def change(value: Any) -> Any:
        nonlocal number
        if isinstance(value, Tensor):
            number += 1
            given = [whole for own, whole in entered if own is value]
            if given:
                return given[0]
            return exchanges.gather(value, group, DIM) if number in indices else value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(change(item) for item in value)
        number += sum(1 for _ in tensors_in(value))
        return value

    return change(output)
