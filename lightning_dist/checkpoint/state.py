"""Convert the state of a module and its optimizers to and from full parameter names, which any layout can load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_dist._compat import module_versions, tree_map
from lightning_dist.checkpoint.manifest import CheckpointError
from lightning_dist.checkpoint.snapshot import with_metadata
from lightning_dist.model.tensor_state import is_remote

__all__ = ["OwnStates", "by_index", "by_name", "load_model", "load_optimizer", "shard_like"]

OwnStates = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor]], Mapping[str, Any]]
"""A function that takes the states of all parameters and the parameters, both by name, and returns those that this rank
keeps."""


def by_name(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the state of ``optimizer`` keyed by full names: ``{"state": {name: {...}}, "param_groups": [...]}``.

    Unlike ``torch.distributed.checkpoint.state_dict``, this does not run an optimizer step to create missing state.
    States of parameters that only other ranks have are left out, because these ranks have the true ones: code that
    looks up ``optimizer.state[param]`` creates an empty state on every rank.
    """
    state = optimizer.state_dict()
    if not optimizer.param_groups:  # Lightning makes such an optimizer if configure_optimizers() returns None.
        return state
    names = _names(optimizer, module)
    order = [index for group in state["param_groups"] for index in group["params"]]
    name_of = dict(zip(order, names, strict=True))
    params = (param for group in optimizer.param_groups for param in group["params"])
    of_others = {index for index, param in zip(order, params, strict=True) if is_remote(param)}
    return {
        **state,
        # Optimizers may keep states that belong to no parameter under keys of their own.
        "state": {
            name_of.get(index, index): value for index, value in state["state"].items() if index not in of_others
        },
        "param_groups": [
            {**group, "params": [name_of[index] for index in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_index(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the names of :func:`by_name` by the parameters' positions, which torch's optimizers load."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    index_of = {name: index for index, name in enumerate(names)}
    return {
        **state,
        "state": {index_of.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [index_of[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def load_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    state: Mapping[str, Any],
    keeps_dtypes: bool = False,
    own_states: OwnStates | None = None,
) -> None:
    """Load ``state``, of :func:`by_name` or of a plain optimizer, into ``optimizer``.

    Args:
        optimizer: Optimizer of parameters of ``module``.
        module: Module that names the parameters.
        state: Optimizer state. Whole tensors in it are sharded like their parameters.
        keeps_dtypes: Whether tensors keep the dtypes that they were saved in, and do not get those of the parameters.
        own_states: Function that returns the states that this rank keeps, of all states by name and the parameters by
            name; it may be a collective. None: this rank keeps its shard of each state, without communication.

    Raises:
        CheckpointError: If the parameter groups differ from those of ``optimizer``.
    """
    if not optimizer.param_groups and not state:
        return
    names = _names(optimizer, module)
    saved = state if _is_by_name(state) else _named_by_position(state, names)
    saved_names = [name for group in saved["param_groups"] for name in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    aliases = dict(module.named_parameters(remove_duplicate=False))
    same = sizes == saved_sizes and all(
        saved_name in aliases and aliases[saved_name] is aliases[name]
        for saved_name, name in zip(saved_names, names, strict=False)
    )
    if not same:
        only_here, only_saved = set(names) - set(saved_names), set(saved_names) - set(names)
        raise CheckpointError(
            f"The checkpoint's {type(optimizer).__name__} has parameter groups of {saved_sizes} parameters, the one of"
            f" this run has {sizes}"
            + (f"; only in this run: {', '.join(sorted(only_here)[:3])}" if only_here else "")
            + (f"; only in the checkpoint: {', '.join(sorted(only_saved)[:3])}" if only_saved else "")
            + ". Use the configure_optimizers that it was saved with, or start a new fit from its weights alone."
        )
    own = saved["state"] if own_states is None else own_states(saved["state"], aliases)
    placed = {
        name: _placed(values, aliases.get(name) if own_states is None else None)
        for name, values in own.items()
        if name not in aliases or not is_remote(aliases[name])  # A meta parameter belongs to another pipeline stage.
    }
    optimizer.load_state_dict(by_index({**saved, "state": placed}))
    if keeps_dtypes:  # torch has cast the state to the parameters' dtype.
        for name, values in placed.items():
            if name not in aliases:
                continue
            loaded = optimizer.state[aliases[name]]
            floating = {
                key: value
                for key, value in values.items()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            }
            loaded.update({key: value.to(loaded[key].device, copy=True) for key, value in floating.items()})


def _placed(values: Any, param: torch.Tensor | None) -> Any:
    """Return the state of a parameter with whole tensors sharded like ``param``; None leaves them whole."""
    if param is None:
        return values
    return {key: tree_map(partial(shard_like, param=param), value) for key, value in values.items()}


def load_model(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
    """Load ``state_dict``, of DTensors or whole tensors, into ``module``, which may be sharded, without communication.

    Raises:
        CheckpointError: If ``strict`` is set and names are missing or unexpected, or if a shape differs. The weights
            are then unchanged.
    """
    targets = module.state_dict()
    params = dict(module.named_parameters(remove_duplicate=False))
    on_other_stages = {
        name for name, target in targets.items() if isinstance(target, torch.Tensor) and is_remote(target)
    }
    missing = [name for name in targets if name not in state_dict and name not in on_other_stages]
    unexpected = [name for name in state_dict if name not in targets]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"The checkpoint does not fit {type(module).__name__}:"
            + (f" it lacks {len(missing)} names ({', '.join(missing[:3])})" if missing else "")
            + (" and" if missing and unexpected else "")
            + (f" it has {len(unexpected)} that the model lacks ({', '.join(unexpected[:3])})" if unexpected else "")
            + ". Load it into the model that it was saved from, or set `strict_loading = False` on the LightningModule."
        )
    tensors = {name: value for name, value in state_dict.items() if name in targets and name not in on_other_stages}
    for name, value in tensors.items():
        target = targets[name]
        # The shapes of buffers are not compared, because modules may load other shapes by code of their own.
        is_param = name in params or isinstance(target, DTensor)
        if is_param and isinstance(value, torch.Tensor) and value.shape != target.shape:
            raise CheckpointError(
                f"The checkpoint's {name} has shape {tuple(value.shape)}, the model's {tuple(target.shape)}: the two"
                " models were built with different sizes."
            )
    placed = {name: shard_like(value, targets[name]) for name, value in tensors.items()}
    merged = with_metadata({**{name: targets[name] for name in on_other_stages}, **placed}, module_versions(state_dict))
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)  # A swapped parameter would lose its hooks.
    try:
        module.load_state_dict(merged, strict=strict)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def shard_like(value: Any, param: torch.Tensor) -> Any:
    """Shard ``value`` like the DTensor ``param`` if it is a whole tensor of the same shape, without communication.

    Otherwise, or if ``param`` is not a DTensor, ``value`` is returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(param, DTensor):
        return value
    if value.shape != param.shape:
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)


def _names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    name_of = {param: name for name, param in module.named_parameters()}
    return [name_of[param] for group in optimizer.param_groups for param in group["params"]]


def _is_by_name(state: Mapping[str, Any]) -> bool:
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def _named_by_position(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    order = [index for group in state["param_groups"] for index in group["params"]]
    name_of = dict(zip(order, names, strict=False))
    return {
        **state,
        "state": {
            name_of.get(index, index): value
            for index, value in state["state"].items()
            if index in name_of or not isinstance(index, int)
        },
        "param_groups": [
            {**group, "params": [name_of.get(index, str(index)) for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }
