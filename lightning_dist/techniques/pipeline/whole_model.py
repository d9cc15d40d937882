"""Give every rank of a pipeline the parameters and buffers of all stages temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.mesh.objects import gather_objects
from lightning_dist.model.tensor_places import Place, put, tensor_places
from lightning_dist.model.tensor_state import is_remote

__all__ = ["whole_model"]


@contextmanager
def whole_model(root: nn.Module, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Replace tensors on the meta device by the values of the rank that has them. This is a collective over ``group``.

    At the end of the context, the meta tensors are put back.

    Args:
        root: The user's module, whose tensors on this rank are not sharded.
        group: Process group of the pipeline's ranks.
        device: Device of this rank's tensors, on which received tensors are created.
    """
    places = _places(root)
    own = {name: (tensor.shape, tensor.dtype) for name, (tensor, _) in places.items() if not is_remote(tensor)}
    of_all = gather_objects(own, group)
    replaced: list[tuple[Tensor, list[Place]]] = []
    try:
        for name, (tensor, registered) in places.items():
            sources = [rank for rank, names in enumerate(of_all) if name in names]
            if not sources or len(sources) == len(of_all):
                continue
            shape, dtype = of_all[sources[0]][name]
            value = (
                torch.empty(shape, dtype=dtype, device=device) if is_remote(tensor) else tensor.detach().contiguous()
            )
            dist.broadcast(value, group=group, group_src=sources[0])
            if is_remote(tensor):
                replaced.append((tensor, registered))
                put(value, registered)
        yield
    finally:
        for tensor, registered in replaced:
            put(tensor, registered)


def _places(root: nn.Module) -> dict[str, tuple[Tensor, list[Place]]]:
    """Return each parameter and buffer with the places in which modules hold it, by its first name."""
    places = tensor_places(root)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), (name, tensor))
    return {name: (tensor, places[key]) for key, (name, tensor) in found.items()}
