"""Decide which part of each parameter a rank of ``tp`` has, and split the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_dist import _compat
from lightning_dist.techniques.tensor_parallel.layers import num_heads, shared_heads
from lightning_dist.techniques.tensor_parallel.plan import PlanError

__all__ = ["Placements"]


class Placements:
    """Collect how the parameters of a model are split, and replace them by DTensors.

    Args:
        root: The model with whole parameters.
        mesh: The one-dimensional mesh of the ranks of ``tp``.
        num_shards: Number of ranks over which FSDP2 shards each rank's part of the parameters.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, num_shards: int) -> None:
        self._root = root
        self._mesh = mesh
        self._group = mesh.get_group()
        self._num_shards = num_shards
        self._placements: dict[nn.Parameter, Placement] = {}  # A parameter is removed from it when it is split.
        self._parents = {child: module for module in root.modules() for child in module.children()}
        self.slice_functions: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {}
        """Functions that take this rank's part of a replicated parameter, by the module that holds it and its name."""
        self.split_names: dict[nn.Module, set[str]] = defaultdict(set)
        """For each module, the names of the parameters of which it uses only this rank's part in its own forward."""

    def split_layer(
        self, name: str, module: nn.Module, key: str, dim: int, num_packed: int = 1, has_heads: bool = True
    ) -> None:
        """Split a parameter of a layer along its features.

        Args:
            name: The layer's full name, for errors.
            module: The layer, which holds the whole parameter.
            key: The parameter's name in the layer, such as ``weight``.
            dim: The parameter's dimension along which the split features lie.
            num_packed: The number of matrices that are packed along ``dim``; each rank has a part of each of them.
            has_heads: Whether the features may be those of attention heads, of which each rank must have whole ones.

        Raises:
            PlanError: If features or heads do not divide by the number of ranks, or if the parameter is tied and the
                plan splits it in another way elsewhere.
        """
        param: nn.Parameter = getattr(module, key)
        size, num_ranks = param.size(dim), self._group.size()
        has_heads = has_heads and num_packed == 1
        heads = num_heads(self._parents.get(module), size) if has_heads else None
        shared = shared_heads(self._root, name, num_ranks) if has_heads else None
        placement: Placement
        if shared is not None:
            placement, rows, rank = Replicate(), size // shared, self._group.rank()
            self.slice_functions[module, key] = partial(
                _rows, dim=dim, start=rank * shared // num_ranks * rows, length=rows
            )
        elif size % (num_packed * num_ranks):
            packed = f" in {num_packed} parts" if num_packed > 1 else ""
            raise PlanError(f"plan: the {size} features{packed} of {name}.{key} do not divide by tp_size={num_ranks}.")
        elif heads is not None and heads % num_ranks:
            raise PlanError(
                f"plan: the {heads} heads of {name}, of {size // heads} features each, do not divide by"
                f" tp_size={num_ranks}."
            )
        elif num_packed == 1:
            placement = Shard(dim)
        elif param.ndim == 1:
            # FSDP2 could shard a packed bias only along the dimension that is split, so the bias, which is small, is
            # replicated.
            placement = Replicate()
            self.slice_functions[module, key] = partial(self._own_of_packed, dim=dim, num_packed=num_packed)
        elif param.size(1 - dim) % self._num_shards:
            raise PlanError(
                f"plan: {name} packs several layers, so that FSDP2 shards its weight along the other dimension, whose"
                f" {param.size(1 - dim)} features do not divide by dp_shard_size={self._num_shards}."
            )
        else:
            placement = _compat.packed_shard(dim, num_packed)
        self._place(f"{name}.{key}", module, key, placement)

    def split_parameter(self, name: str, owner: nn.Module, key: str, dim: int) -> None:
        """Split a parameter that belongs to no split layer along ``dim``.

        Args:
            name: The parameter's full name, for errors.
            owner: The module that holds the parameter.
            key: The parameter's name in ``owner``.
            dim: The dimension along which it is split.

        Raises:
            PlanError: If the size of ``dim`` does not divide by the number of ranks, or if the parameter is tied and
                the plan splits it in another way elsewhere.
        """
        param: nn.Parameter = getattr(owner, key)
        if param.size(dim) % self._group.size():
            raise PlanError(
                f"plan: the {param.size(dim)} elements of {name} along dimension {dim} do not divide by"
                f" tp_size={self._group.size()}."
            )
        self._place(name, owner, key, Shard(dim))

    def _place(self, name: str, owner: nn.Module, key: str, placement: Placement) -> None:
        self.split_names[owner].add(key)
        if self._placements.setdefault(getattr(owner, key), placement) != placement:
            raise PlanError(f"plan: {name} is tied to a parameter that is split otherwise.")

    def _own_of_packed(self, tensor: Tensor, dim: int, num_packed: int) -> Tensor:
        ranks = self._group.size()
        shape = (*tensor.shape[:dim], num_packed, ranks, tensor.size(dim) // num_packed // ranks)
        parts = tensor.reshape(*shape, *tensor.shape[dim + 1 :]).select(dim + 1, self._group.rank())
        return parts.flatten(dim, dim + 1).contiguous()

    def split(self, params: Iterable[nn.Parameter], owners: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """Replace ``params`` by DTensors over ``tp`` in the modules that hold them.

        Args:
            params: The whole parameters, which are the same on all ranks.
            owners: The modules that hold the parameters.

        Returns:
            The new parameter for each old one.
        """
        new: dict[nn.Parameter, nn.Parameter] = {}
        for param in params:
            placement = self._placements.pop(param, Replicate())
            local = param.detach()
            if isinstance(placement, Shard):
                local = local.chunk(self._group.size(), placement.dim)[self._group.rank()].clone().contiguous()
            elif num_packed := _compat.num_packed(placement):
                local = self._own_of_packed(local, cast(int, placement.dim), num_packed)  # type: ignore[attr-defined]
            dtensor = DTensor.from_local(
                local, self._mesh, [placement], run_check=False, shape=param.shape, stride=param.stride()
            )
            new[param] = nn.Parameter(dtensor, param.requires_grad)
            _compat.move_hooks(param, new[param])
        for owner in owners:
            for key, owned in list(_compat.own_parameters(owner).items()):
                if owned is not None and owned in new:
                    _compat.put_parameter(owner, key, new[owned])
        return new


def _rows(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    return tensor.narrow(dim, start, length)
