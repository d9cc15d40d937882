"""The whole of a model on every rank of a pipeline, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    put: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, (tensor, registered) in places.items():
            sources = [rank for rank, names in enumerate(of_all) if name in names]
            if not sources or len(sources) == len(of_all):
                continue
            shape, dtype = of_all[sources[0]][name]
            value = torch.empty(shape, dtype=dtype, device=device) if tensor.is_meta else tensor.detach().contiguous()
            dist.broadcast(value, group=group, group_src=sources[0])
            for tensors, key in registered if tensor.is_meta else ():
                put.append((tensors, key, tensor))
                tensors[key] = value
        yield
    finally:
        for tensors, key, tensor in put:
            tensors[key] = tensor


def _places(root: nn.Module) -> dict[str, tuple[Tensor, list[tuple[dict[str, Any], str]]]]:
    """Of each parameter and buffer, by its first name: the tensor, and where modules have it."""
    found: dict[int, tuple[str, Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for prefix, module in root.named_modules():
        registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in registered:
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found.setdefault(id(tensor), (name, tensor, []))[2].append((tensors, key))
    return {name: (tensor, registered) for name, tensor, registered in found.values()}
