"""Split tensors with a dimension of attention heads on entry to a split module, and gather them on return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.mesh import autograd_collectives
from lightning_dist.techniques.tensor_parallel.plan import SplitHeads
from lightning_dist.tracing.step_graph import tensors_in

__all__ = ["add_head_hooks"]

DIM = -3
"""Dimension of the heads in attention scores, which have the shape ``(..., heads, queries, keys)``."""


def add_head_hooks(module: nn.Module, plan: SplitHeads, group: dist.ProcessGroup, is_off: Callable[[], bool]) -> None:
    """Add hooks to ``module`` that split heads of its arguments over the ranks, and gather heads of its outputs.

    An argument that the module returns unchanged, such as a position bias that blocks pass on to each other, is not
    gathered: the caller gets back the tensor that it passed.

    Args:
        module: A module whose layers are split.
        plan: The arguments and outputs of the module that have a dimension of heads.
        group: Process group of the ranks of ``tp``.
        is_off: Function that returns whether the hooks must do nothing, because the module holds whole parameters now.
    """
    entered: list[tuple[Tensor, Tensor]] = []  # Each pair is this rank's heads and the argument with all heads.

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered.clear()
        if is_off():
            return None
        given, named = list(args), dict(kwargs)
        for key in plan.arguments:
            holder: Any = given if isinstance(key, int) else named
            has_key = key < len(given) if isinstance(key, int) else key in named
            value = holder[key] if has_key else None
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

    # torch.compile gains nothing by tracing into the hooks, since collectives break the graph.
    disable = cast(Callable[[Any], Any], torch.compiler.disable)
    module.register_forward_pre_hook(disable(enter), with_kwargs=True)
    module.register_forward_hook(disable(leave))


def _own_heads(tensor: Tensor, num_heads: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's heads of ``tensor``, whose dimension of heads may contain all heads of each sample in turn."""
    size = tensor.size(DIM)
    per_sample = tensor.unflatten(DIM, (size // num_heads, num_heads))  # type: ignore[no-untyped-call]
    own = autograd_collectives.split(per_sample, group, DIM) if tensor.requires_grad else _part(per_sample, group)
    return own.flatten(DIM - 1, DIM)


def _part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), DIM)[group.rank()]


def _with_all_heads(
    output: Any, indices: tuple[int, ...], entered: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> Any:
    """Return ``output`` with the tensors at ``indices`` gathered, so that they have all heads.

    This is one collective for each of these tensors.

    Args:
        output: The value that the module returned.
        indices: Indices of the tensors to gather, in the order of
            :func:`~lightning_dist.tracing.step_graph.fake_run.tensors_in`.
        entered: Pairs of an argument with this rank's heads, as the module was given it, and the same argument with all
            heads. A returned tensor that is the first of a pair is replaced by the second.
        group: Process group of the ranks of ``tp``.
    """
    number = -1

    def change(value: Any) -> Any:
        nonlocal number
        if isinstance(value, Tensor):
            number += 1
            given = [whole for own, whole in entered if own is value]
            if given:
                return given[0]
            return autograd_collectives.gather(value, group, DIM) if number in indices else value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(change(item) for item in value)
        number += sum(1 for _ in tensors_in(value))
        return value

    return change(output)
