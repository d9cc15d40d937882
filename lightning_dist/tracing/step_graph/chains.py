"""Find chains of blocks: those that pass hidden states to the next block, which nothing else uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from lightning_dist.tracing.step_graph.dataflow import Call, Dataflow, is_used_outside
from lightning_dist.tracing.step_graph.fake_run import tensors_in

__all__ = ["argument_of", "find_chains", "hidden_key", "output_values"]


def find_chains(dataflow: Dataflow, blocks: Collection[str]) -> list[list[str]]:
    """Return the names of the blocks in chains, in which only the next block is given a block's output.

    Args:
        dataflow: The record of a step.
        blocks: Full names of the blocks; those without an argument of hidden states are in no chain.
    """
    chains: list[list[str]] = []
    before: Tensor | None = None
    for call in dataflow.calls:
        if call.name not in blocks:
            continue
        key = hidden_key(call)
        given = None if key is None else argument_of(call, key)
        if before is not None and given is before and not is_used_outside(before):
            chains[-1].append(call.name)
        elif key is not None:
            chains.append([call.name])
        before = None if key is None else next(tensors_in(output_values(call.output)), None)
    return chains


def hidden_key(call: Call) -> int | str | None:
    """Return the position or name of the argument with the hidden states, or None if there is none.

    It is the first argument with the shape of the first returned tensor, if it has a floating-point dtype.
    """
    output = next(tensors_in(output_values(call.output)), None)
    named: Sequence[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in named:
        if isinstance(value, Tensor) and output is not None and value.shape == output.shape:
            return key if value.is_floating_point() else None
    return None


def argument_of(call: Call, key: int | str) -> Tensor:
    """Return the argument of ``call`` with the position or name ``key``."""
    value: Tensor = call.args[key] if isinstance(key, int) else call.kwargs[key]
    return value


def output_values(output: object) -> object:
    """Return the values of ``output`` as a list if it is a mapping, as model outputs of Hugging Face are."""
    return list(output.values()) if isinstance(output, Mapping) else output
