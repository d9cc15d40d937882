"""Find the places where a model holds its parameters and buffers, so that other tensors can be put there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_dist._compat import own_buffers, own_parameters

__all__ = ["Place", "put", "tensor_places"]

Place = tuple[Any, Any]
"""A dictionary or list, and the key or index at which it holds a tensor."""


def tensor_places(root: nn.Module) -> dict[int, list[Place]]:
    """Find every place where ``root`` holds one of its parameters or buffers.

    The places are where the modules register parameters and buffers, and in the lists and dictionaries among their
    attributes: torch's recurrent layers compute with such a list, not with their registered parameters.

    Args:
        root: The model, which is searched together with its submodules.

    Returns:
        The places of each parameter or buffer by its ``id``, those where modules register them first.
    """
    places: dict[int, list[Place]] = {}
    for module in root.modules():
        for tensors in (own_parameters(module), own_buffers(module)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((tensors, key))
    for module in root.modules():
        registered = (own_parameters(module), own_buffers(module))
        for container in vars(module).values():
            for key, item in _items(container) if all(container is not known for known in registered) else ():
                if isinstance(item, Tensor) and id(item) in places:
                    places[id(item)].append((container, key))
    return places


def put(tensor: Tensor | None, places: list[Place]) -> None:
    """Put ``tensor`` into every one of ``places``."""
    for container, key in places:
        container[key] = tensor


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    if type(container) is dict:
        yield from container.items()
    elif type(container) is list:
        yield from enumerate(container)
