"""Look up the methods that techniques override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from lightning_dist.parameters.gradient_reducer import GradientReducer
from lightning_dist.parameters.reruns import OtherParameters, UnchangedParameters
from lightning_dist.parameters.shard_memory import ShardMemory
from lightning_dist.techniques.protocol.roles import (
    ParameterForms,
    ParameterRules,
    RemoteParts,
    SavedState,
    TokenSplits,
)
from lightning_dist.techniques.protocol.technique import Parallel, Technique

__all__ = ["INSIDE_OUT", "Points", "bound", "find_gradient_reducer", "find_shard_memory", "others_of"]

_Technique = TypeVar("_Technique", bound=Technique)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

INSIDE_OUT = frozenset(
    {
        "after_backward",
        "after_error",
        "after_microbatches",
        "after_optimizer_step",
        "after_step",
        "finish",
        "finish_output",
        "on_free",
        "prepare_unit",
        "reduce_microbatches",
        "state_to_write",
        "whole",
        "whole_optimizer_state",
        "wrap_step",
        "write_back",
    }
)
"""Names of the methods that are called for the innermost technique first; others are called outermost first."""


def bound(
    techniques: Sequence[Technique], point: Callable[Concatenate[_Technique, _Arguments], _Result]
) -> tuple[Callable[_Arguments, _Result], ...]:
    """Return the method ``point`` of each technique that overrides it, in the order in which they are called.

    Args:
        techniques: The techniques, from the outside in.
        point: A method of :class:`Technique` or of a role, such as ``Technique.before_step``.
    """
    name = point.__name__
    found = [getattr(technique, name) for technique in techniques if getattr(type(technique), name, point) is not point]
    return tuple(reversed(found) if name in INSIDE_OUT else found)


def others_of(module: nn.Module, parallel: Parallel) -> OtherParameters:
    """Return the object that finds tensors which a step puts in the place of parameters of ``module``.

    Args:
        module: A module of a parallel module.
        parallel: The parallel module.
    """
    forms = bound(parallel.techniques, ParameterForms.is_form_of_parameter)
    return OtherParameters(
        parallel.module,
        module,
        lambda: parallel.groups,
        lambda owner, name, held: any(is_form(owner, name, held) for is_form in forms),
    )


def unchanged_in(module: nn.Module, parallel: Parallel, argument: str) -> UnchangedParameters:
    """Return the object that raises an error if a parameter changes between a forward of ``module`` and its rerun.

    Args:
        module: A module of a parallel module.
        parallel: The parallel module.
        argument: The argument for which the module runs again.
    """
    return UnchangedParameters(parallel.module, module, lambda: parallel.groups, argument)


def find_gradient_reducer(techniques: Sequence[Technique]) -> GradientReducer | None:
    """Return the object that averages gradients over ``dp_replicate`` in place of an all-reduce; None: there is none.

    Args:
        techniques: The techniques, from the outside in.
    """
    reducers = (reducer() for reducer in bound(techniques, ParameterRules.gradient_reducer))
    return next((reducer for reducer in reducers if reducer is not None), None)


def find_shard_memory(techniques: Sequence[Technique]) -> ShardMemory | None:
    """Return the memory that keeps shards of parameters between their uses; None: that of the device.

    Args:
        techniques: The techniques, from the outside in.
    """
    memories = (shard_memory() for shard_memory in bound(techniques, ParameterRules.shard_memory))
    return next((memory for memory in memories if memory is not None), None)


class Points:
    """Hold, for each method of :class:`Technique`, the overriding methods of all techniques (see :func:`bound`).

    Args:
        techniques: The techniques, from the outside in.
    """

    def __init__(self, techniques: Sequence[Technique]) -> None:
        self.select_units = bound(techniques, Technique.select_units)
        self.remote_tensors = bound(techniques, RemoteParts.remote_tensors)
        self.attach = bound(techniques, Technique.attach)
        self.prepare_unit = bound(techniques, Technique.prepare_unit)
        self.shard_dim = bound(techniques, ParameterRules.shard_dim)
        self.param_dtype = bound(techniques, ParameterRules.param_dtype)
        self.gradient_reducer = bound(techniques, ParameterRules.gradient_reducer)
        self.shard_memory = bound(techniques, ParameterRules.shard_memory)
        self.manage_unit = bound(techniques, Technique.manage_unit)
        self.finish = bound(techniques, Technique.finish)
        self.before_training_step = bound(techniques, Technique.before_training_step)
        self.before_step = bound(techniques, Technique.before_step)
        self.around_step = bound(techniques, Technique.around_step)
        self.wrap_step = bound(techniques, Technique.wrap_step)
        self.on_gather = bound(techniques, Technique.on_gather)
        self.on_free = bound(techniques, Technique.on_free)
        self.around_rerun = bound(techniques, Technique.around_rerun)
        self.finish_output = bound(techniques, Technique.finish_output)
        self.after_step = bound(techniques, Technique.after_step)
        self.after_error = bound(techniques, Technique.after_error)
        self.around_backward = bound(techniques, Technique.around_backward)
        self.after_backward = bound(techniques, Technique.after_backward)
        self.gradients_left = bound(techniques, ParameterForms.gradients_left)
        self.prepare_optimizer = bound(techniques, Technique.prepare_optimizer)
        self.before_optimizer_step = bound(techniques, Technique.before_optimizer_step)
        self.after_optimizer_step = bound(techniques, Technique.after_optimizer_step)
        self.synchronize_replicas = bound(techniques, Technique.synchronize_replicas)
        self.around_microbatches = bound(techniques, Technique.around_microbatches)
        self.reduce_microbatches = bound(techniques, Technique.reduce_microbatches)
        self.after_microbatches = bound(techniques, Technique.after_microbatches)
        self.around_hook = bound(techniques, Technique.around_hook)
        self.without_hook_views = bound(techniques, RemoteParts.without_hook_views)
        self.whole = bound(techniques, Technique.whole)
        self.splits_tokens_of = bound(techniques, TokenSplits.splits_tokens_of)
        self.may_split_tokens_of = bound(techniques, TokenSplits.may_split_tokens_of)
        self.while_gathered = bound(techniques, Technique.while_gathered)
        self.total_norm = bound(techniques, Technique.total_norm)
        self.agree_on_buffers = bound(techniques, RemoteParts.agree_on_buffers)
        self.state_to_write = bound(techniques, SavedState.state_to_write)
        self.hook_state_to_write = bound(techniques, RemoteParts.hook_state_to_write)
        self.add_remote_state = bound(techniques, RemoteParts.add_remote_state)
        self.whole_optimizer_state = bound(techniques, SavedState.whole_optimizer_state)
        self.collect_parts = bound(techniques, RemoteParts.collect_parts)
        self.original = bound(techniques, RemoteParts.original)
        self.state = bound(techniques, SavedState.state)
        self.state_template = bound(techniques, SavedState.state_template)
        self.load_state = bound(techniques, SavedState.load_state)
        self.table_rows = bound(techniques, Technique.table_rows)
        self.metrics = bound(techniques, Technique.metrics)
        self.copies = bound(techniques, ParameterForms.copies)
        self.write_back = bound(techniques, ParameterForms.write_back)
        self.write_back_data = bound(techniques, ParameterForms.write_back_data)
        self.is_form_of_parameter = bound(techniques, ParameterForms.is_form_of_parameter)
