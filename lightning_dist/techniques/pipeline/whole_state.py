"""Add the names, shapes and scalars of other stages' state to this rank's state, as a checkpoint needs them.

The tensors themselves are written by the ranks that have those stages.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist.mesh.objects import gather_objects
from lightning_dist.model.tensor_state import is_remote

__all__ = ["optimizer_state_of_all", "with_one_writer_per_tensor", "with_replicated_tensors"]


def with_replicated_tensors(state: Mapping[str, Any], mesh: DeviceMesh, of_others: Collection[str]) -> dict[str, Any]:
    """Return a module's ``state`` with plain tensors as replicated DTensors, so that one rank of ``mesh`` writes each.

    Args:
        state: The module's state dict, with meta tensors for the parameters of other stages.
        mesh: Device mesh of the ranks that have the same stages.
        of_others: The names of the tensors that ranks of another stage write; they become meta tensors.
    """

    def written(name: str, value: Any) -> Any:
        if name in of_others and isinstance(value, Tensor):
            return torch.empty_like(value, device="meta")
        return _replicated(value, mesh)

    return {name: written(name, value) for name, value in state.items()}


def with_one_writer_per_tensor(state: dict[str, Any], group: dist.ProcessGroup, mesh: DeviceMesh) -> dict[str, Any]:
    """Return ``state`` with meta tensors in place of those that another stage writes.

    Where some stages lack a tensor, the first stage that has it writes it.

    This is a collective over ``group``.

    Args:
        state: Nested dictionaries, lists and tuples, with meta tensors in place of those of other stages.
        group: Process group of the ranks of one pipeline.
        mesh: Device mesh of the ranks that have the same stages.
    """
    own: set[str] = set()

    def find_missing(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and is_remote(leaf):
            own.add(name)
        return leaf

    _map_leaves(find_missing, state)
    missing = gather_objects(own, group)
    lacking = set[str]().union(*missing)
    if not lacking:
        return state

    def written(name: str, leaf: Any) -> Any:
        if name not in lacking or not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or is_remote(leaf):
            return leaf
        first = next(rank for rank, names in enumerate(missing) if name not in names)
        return _replicated(leaf, mesh) if first == group.rank() else torch.empty_like(leaf, device="meta")

    return cast(dict[str, Any], _map_leaves(written, state))


def _map_leaves(function: Callable[[str, Any], Any], value: Any, path: str = "") -> Any:
    """Return nested dictionaries, lists and tuples with each leaf replaced by ``function`` of its path and itself.

    Containers of other classes are leaves.
    """
    if type(value) in (dict, OrderedDict, defaultdict):
        mapped = copy(value)  # It keeps its other attributes, such as the versions of the modules of a state dict.
        mapped.update({key: _map_leaves(function, item, f"{path}[{key!r}]") for key, item in value.items()})
        return mapped
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if is_named or type(value) in (list, tuple):
        items = [_map_leaves(function, item, f"{path}[{index}]") for index, item in enumerate(value)]
        return type(value)(*items) if is_named else type(value)(items)
    return function(path, value)


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or is_remote(value):
        return value
    return DTensor.from_local(value.detach().clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def optimizer_state_of_all(state: dict[str, Any], group: dist.ProcessGroup, mesh: DeviceMesh) -> dict[str, Any]:
    """Return an optimizer's ``state`` with the states of the parameters of all stages.

    This is a collective over ``group``. In the states of other stages, tensors are meta tensors and scalars have their
    values. This rank's own tensors become replicated DTensors over ``mesh``.

    Args:
        state: The optimizer's state dict by parameter name, from :func:`lightning_dist.checkpoint.state.by_name`.
        group: Process group of the ranks of one pipeline.
        mesh: Device mesh of the ranks that have the same stages.
    """
    own = {name: {key: _outline(value) for key, value in values.items()} for name, values in state["state"].items()}
    outlines = gather_objects(own, group)
    merged = {
        name: {key: _replicated(value, mesh) if isinstance(own[name][key], _Outline) else value
               for key, value in values.items()}
        for name, values in state["state"].items()
    }  # fmt: skip
    for outline in outlines:
        for name, values in outline.items():
            if name not in merged:
                merged[name] = {key: _stand_in(value) for key, value in values.items()}
    return {**state, "state": {name: merged[name] for group in state["param_groups"] for name in group["params"]
                               if name in merged}}  # fmt: skip


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor) and (isinstance(value, DTensor) or value.ndim > 0):
        return _Outline(value.shape, value.dtype)
    return value


def _stand_in(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Outline) else value


class _Outline:
    """Hold the shape and dtype of a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
