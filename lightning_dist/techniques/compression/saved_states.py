"""Write compressors' tensors into checkpoints, and read them in a run with any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_dist._compat import local_of, shifted
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.compression.compressor import Compressor, CompressorState, wide_dtype

__all__ = ["SavedStates", "add_states_of_others", "empty_dtensor", "placements_of", "to_dtensor"]

CollectParts = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


class SavedStates:
    """Convert a compressor's tensors about each parameter to and from DTensors.

    A tensor that differs between replicas, such as a residual, is saved with the shape ``(R, *shape)`` for ``R``
    replicas of a parameter of the shape ``shape``, or as the replicas' mean with the shape ``shape``. A run with
    another number of replicas gives each of them the mean, which is what the sum of all applied gradients depends on.
    A tensor about a rank's shard, such as a factor of PowerSGD, is saved with the shape ``(S, *local)`` for ``S``
    shards. After a change of the number of shards, each new shard gets the tensor of the old shard that covers its
    beginning.

    Args:
        compressor: The compressor, which says what differs between replicas, and which residuals are saved.
        params: The module's parameters by full name, sharded as the optimizer sees them.
        mesh: Device mesh over which parameters are DTensors; its first axis is that of the replicas.
    """

    def __init__(self, compressor: Compressor, params: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        self._compressor = compressor
        self._params = params
        self._mesh = mesh
        self._num_replicas = mesh.size(0)
        self._num_shards = mesh.size() // mesh.size(0)

    def save(
        self,
        states: dict[str, CompressorState],
        num_reductions: Mapping[str, int] | None,
        collects: Iterable[CollectParts],
    ) -> dict[str, dict[str, Any]]:
        """Return the tensors and the number of reductions of each parameter, by full name. This is a collective.

        Args:
            states: This rank's tensors about each parameter.
            num_reductions: Number of reductions of each parameter's gradient; those of frozen parameters are left out.
                None: they are not counted, and all parameters are saved.
            collects: Functions that gather dictionaries from ranks with other parameters.
        """
        # A rank whose shard of a parameter is too small to be compressed has no tensors about it, and others have.
        kinds = set().union(*gather_objects({key for state in states.values() for key in state}))
        names = [name for name, param in self._params.items() if not is_remote(param)]
        names = [name for name in names if self._compressor.compresses(name, self._params[name].shape)]
        if num_reductions is not None:
            names = [name for name in names if num_reductions.get(name)]
        saved: dict[str, dict[str, Any]] = {}
        for name in names:
            state = states.get(name, {})
            tensors = {key: self._saved(name, key, state.get(key)) for key in sorted(kinds)}
            saved[name] = {key: value for key, value in tensors.items() if value is not None}
            saved[name]["num_reductions"] = 0 if num_reductions is None else num_reductions[name]
        add_states_of_others(saved, collects)
        return saved

    def _saved(self, name: str, key: str, local: Tensor | None) -> DTensor | None:
        """Return a DTensor of which ``local`` is this rank's part; None: it is not saved."""
        param = self._params[name]
        if key not in self._compressor.per_replica:
            shape = self._compressor.shard_state_shape(key, local_of(param).shape)
            local = torch.zeros(shape, device=param.device) if local is None else local.clone()
            whole = torch.Size([self._num_shards, *shape])
            placements: list[Placement] = [Replicate(), *[Shard(0)] * (self._mesh.ndim - 1)]
            return to_dtensor(local.unsqueeze(0), self._mesh, placements, whole)
        if self._compressor.save_residuals == "none":
            return None
        # The background thread of a save reads the copy while the next backward changes the original.
        own = local_of(param)
        local = torch.zeros_like(own, dtype=wide_dtype(own)) if local is None else local.clone()
        placements = placements_of(param, self._mesh)[1:]
        if self._compressor.save_residuals == "mean":
            dist.all_reduce(local, group=self._mesh.get_group(0))
            return to_dtensor(local.div_(self._num_replicas), self._mesh, [Replicate(), *placements], param.shape)
        whole = torch.Size([self._num_replicas, *param.shape])
        return to_dtensor(local.unsqueeze(0), self._mesh, [Shard(0), *map(shifted, placements)], whole)

    def template(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor for what this rank needs of a saved tensor; None if it needs nothing."""
        param = self._params.get(name)
        if param is None or is_remote(param):
            return None
        empty = partial(empty_dtensor, self._mesh, shape=shape, dtype=dtype)
        if key not in self._compressor.per_replica:
            if shape[0] == self._num_shards:
                return empty(placements=[Replicate(), *[Shard(0)] * (self._mesh.ndim - 1)])
            return torch.empty(shape, dtype=dtype)
        placements = placements_of(param, self._mesh)[1:]
        if shape == param.shape:
            return empty(placements=[Replicate(), *placements])
        if shape[1:] != param.shape:
            return None
        first: Placement = Shard(0) if shape[0] == self._num_replicas else Replicate()
        return empty(placements=[first, *map(shifted, placements)])

    def load(self, saved: dict[str, dict[str, Any]]) -> tuple[dict[str, CompressorState], dict[str, int]]:
        """Return this rank's tensors about each parameter, and the numbers of reductions, from what was read."""
        states, num_reductions = dict[str, CompressorState](), dict[str, int]()
        for name, entry in saved.items():
            param = self._params.get(name)
            if param is None or is_remote(param):
                continue
            num_reductions[name] = entry["num_reductions"]
            if not self._compressor.compresses(name, local_of(param).shape):
                continue
            tensors = {key: self._loaded(key, value, param) for key, value in entry.items() if key != "num_reductions"}
            states[name] = {key: value for key, value in tensors.items() if value is not None}
        return states, num_reductions

    def _loaded(self, key: str, value: Tensor, param: Tensor) -> Tensor | None:
        """Return this rank's tensor; None if what was saved does not fit, so that the compressor begins anew."""
        local = local_of(value)
        if key in self._compressor.per_replica:
            if value.shape == param.shape:
                return local
            return local[0] if value.shape[0] == self._num_replicas else local.mean(dim=0)
        if not isinstance(value, DTensor):
            coordinate = self._mesh.get_coordinate()
            assert coordinate is not None
            index = 0
            for size, position in zip(self._mesh.shape[1:], coordinate[1:], strict=True):
                index = index * size + position
            local = value[index * len(value) // self._num_shards :][:1]
        fits = local.shape[1:] == self._compressor.shard_state_shape(key, local_of(param).shape)
        return local[0].to(param.device) if fits and local.any() else None


def placements_of(param: Tensor, mesh: DeviceMesh) -> list[Placement]:
    """Return the placements of a parameter on the axes of ``mesh``, of which it may be a DTensor over the last ones."""
    own = list(param.placements) if isinstance(param, DTensor) else []
    return [*[Replicate()] * (mesh.ndim - len(own)), *own]


def to_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return a DTensor of the shape ``shape``, of which ``local`` is this rank's part."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def empty_dtensor(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype) -> DTensor:
    """Return a DTensor without values."""
    empty: DTensor = torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return empty


def add_states_of_others(saved: dict[str, dict[str, Any]], collects: Iterable[CollectParts]) -> None:
    """Add to ``saved`` what ranks with other parameters save, with tensors on the meta device. This is a collective.

    Args:
        saved: Tensors and plain values by the full names of parameters.
        collects: Functions that gather dictionaries from ranks with other parameters.
    """
    parts: list[dict[str, Any]] = [
        {name: {key: _outline(value) for key, value in entry.items()} for name, entry in saved.items()}
    ]
    for collect in collects:
        parts = collect(parts)
    for name, entry in (item for part in parts for item in part.items()):
        if name not in saved:
            saved[name] = {key: _on_meta(value) for key, value in entry.items()}


def _outline(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _on_meta(value: Any) -> Any:
    return torch.empty(value[0], dtype=value[1], device="meta") if isinstance(value, tuple) else value
