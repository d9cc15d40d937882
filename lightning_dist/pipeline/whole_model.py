"""The whole of a model on every rank of a pipeline, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.tensor_places import Place, put, tensor_places

__all__ = ["whole_model"]


@contextmanager
def whole_model(root: nn.Module, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Inside, what is on the meta device here has the values that another rank has. A collective over ``group``.

    Args:
        root: The user's module; what this rank has of it is whole.
        group: The ranks of a pipeline.
        device: Where tensors are.
    """
    places = _places(root)
    own = {name: (tensor.shape, tensor.dtype) for name, (tensor, _) in places.items() if not tensor.is_meta}
    of_all: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_all, own, group)
    replaced: list[tuple[Tensor, list[Place]]] = []
    try:
        for name, (tensor, registered) in places.items():
            sources = [rank for rank, names in enumerate(of_all) if name in names]
            if not sources or len(sources) == len(of_all):
                continue
            shape, dtype = of_all[sources[0]][name]
            value = torch.empty(shape, dtype=dtype, device=device) if tensor.is_meta else tensor.detach().contiguous()
            dist.broadcast(value, group=group, group_src=sources[0])
            if tensor.is_meta:
                replaced.append((tensor, registered))
                put(value, registered)
        yield
    finally:
        for tensor, registered in replaced:
            put(tensor, registered)


def _places(root: nn.Module) -> dict[str, tuple[Tensor, list[Place]]]:
    """Return the tensor and the places of each parameter and buffer, by its first name."""
    places = tensor_places(root)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), (name, tensor))
    return {name: (tensor, places[key]) for key, (name, tensor) in found.items()}
