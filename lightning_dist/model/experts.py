"""Find the experts of mixtures: modules that hold the weights of all experts, stacked along the first dimension."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["find_experts", "looks_like_experts", "num_inputs", "without_dispatch"]


def find_experts(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in ``root`` that hold stacked experts, by full name.

    This is the form that Hugging Face's models of mixtures have since version 5: an attribute ``num_experts``, and
    parameters with that size along their first dimension, of which one has three dimensions. The forward is given the
    hidden states of shape ``(tokens, features)``, and for each token the indices and weights of its experts, of shape
    ``(tokens, k)``; it returns hidden states of the same shape.
    """
    return {name: module for name, module in root.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    number, params = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(number, int) or not params or not any(param.ndim == 3 for param in params):
        return False
    return num_inputs(module) == 3 and all(param.ndim > 1 and param.size(0) == number for param in params)


def num_inputs(module: nn.Module) -> int:
    """Return 3 if the forward of ``module`` can be called with 3 inputs, and else the number of its required ones."""
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    named = [one for one in arguments if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    num_required = sum(one.default is one.empty for one in named)
    num_by_position = sum(one.kind is not one.KEYWORD_ONLY for one in named)
    return 3 if num_required <= 3 <= num_by_position else num_required


def looks_like_experts(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in ``root`` that seem to hold stacked experts, in whatever way they are called, by full name.

    They have an attribute ``num_experts``, and a parameter of three dimensions with that size along the first one.
    """

    def seems(module: nn.Module) -> bool:
        number = getattr(module, "num_experts", None)
        stacked = (param.ndim == 3 and param.size(0) == number for param in module.parameters(recurse=False))
        return isinstance(number, int) and any(stacked)

    return {name: module for name, module in root.named_modules() if seems(module)}


@contextmanager
def without_dispatch(root: nn.Module) -> Iterator[None]:
    """Replace the forwards of experts in this context by functions of the same shapes, for a step on fake tensors.

    Which experts have tokens depends on values, which fake tensors do not have.
    """
    experts = find_experts(root).values()
    replaced = [(module, vars(module).get("forward")) for module in experts]
    for module in experts:
        module.forward = _scaled
    try:
        yield
    finally:
        for module, forward in replaced:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _scaled(hidden_states: Tensor, indices: Tensor, weights: Tensor, *args: Any) -> Tensor:
    return hidden_states * weights.sum(-1, keepdim=True).to(hidden_states.dtype)
