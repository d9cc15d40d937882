"""Find the places where a model holds its parameters and buffers, so that other tensors can be put there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["Place", "put", "tensor_places"]

Place = tuple[Any, Any]
"""A dictionary or list, and the key or index at which it holds a tensor."""

_REGISTERED = ("_parameters", "_buffers")


def tensor_places(root: nn.Module) -> dict[int, list[Place]]:
    """Find every place where ``root`` holds one of its parameters or buffers.

    The places are in the modules' ``_parameters`` and ``_buffers``, and in the lists and dictionaries among their
    attributes: torch's recurrent layers compute with such a list (``_flat_weights``), not with their registered
    parameters.

    Args:
        root: The model, which is searched together with its submodules.

    Returns:
        The places of each parameter or buffer by its ``id``, those in ``_parameters`` and ``_buffers`` first.
    """
    places: dict[int, list[Place]] = {}
    for module in root.modules():
        for register in _REGISTERED:
            tensors = vars(module)[register]
            for key, tensor in tensors.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((tensors, key))
    for module in root.modules():
        for name, container in vars(module).items():
            for key, item in _items(container) if name not in _REGISTERED else ():
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
