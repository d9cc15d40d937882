"""Let torch's functions of many tensors work on DTensors over several device meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import optimizer

__all__ = ["group_by_mesh"]

Grouped = dict[Any, tuple[list[list[Any]], list[int]]]


class _Key(tuple[Any, ...]):
    """Represent a device and a dtype of tensors over one mesh, unequal to those of another mesh."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def group_by_mesh() -> None:
    """Let clipping of gradients, and torch's optimizers, act on DTensors over different meshes in turn.

    They call one function for all tensors of a device and a dtype, which DTensors accept over one mesh only. The
    grouping by device and dtype is extended by meshes, for good. Norms over several meshes need more than that.

    Replaced by: functions of many DTensors that accept several meshes.
    """
    for module in (clip_grad, optimizer):
        own = module._group_tensors_by_device_and_dtype
        if not isinstance(own, _GroupByMesh):
            module._group_tensors_by_device_and_dtype = _GroupByMesh(own)  # type: ignore[attr-defined]


class _GroupByMesh:
    """Group tensors as torch does, and by mesh as well if they are DTensors over several meshes.

    Args:
        own: The function of torch that groups tensors by device and dtype.
    """

    def __init__(self, own: Callable[..., Grouped]) -> None:
        self._own = own

    def __call__(self, tensorlistlist: Sequence[Sequence[Any]], with_indices: bool = False) -> Grouped:
        """Return the groups by device and dtype.

        Args:
            tensorlistlist: Lists of as many tensors each, or of none, which are grouped by those of the first one.
            with_indices: Whether the positions of the tensors are returned as well.
        """
        positions: dict[DeviceMesh | None, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensorlistlist[0]):
            positions[tensor.device_mesh if isinstance(tensor, DTensor) else None].append(index)
        if len(positions) < 2:
            return self._own(tensorlistlist, with_indices)
        grouped: Grouped = {}
        for chosen in positions.values():
            part = [[tensors[index] for index in chosen] if tensors else [] for tensors in tensorlistlist]
            for key, (lists, indices) in self._own(part, with_indices).items():
                grouped[_Key(key)] = lists, [chosen[index] for index in indices]
        return grouped
