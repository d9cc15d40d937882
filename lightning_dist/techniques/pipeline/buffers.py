"""Restore buffers that every microbatch changes, although one process would change them only once per step.

A step of a pipeline runs once for each microbatch. A buffer in a part that depends on the batch (a running mean) is
updated by one microbatch after another, as in gradient accumulation. A buffer whose new value depends on weights and
buffers alone (the power iteration of a spectral norm, a count of forwards) would be updated once for each microbatch,
where one process updates it once. Such a buffer is therefore reset before each microbatch to its value before the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist._compat import own_buffers
from lightning_dist.model.tensor_state import is_remote

__all__ = ["BuffersOfStep"]


class BuffersOfStep:
    """Copy buffers before a step, and restore them later.

    Buffers on the meta device, which belong to other ranks' stages, are left out.

    Args:
        root: The user's module, in which the names are looked up.
        names: Full names of the buffers to copy; names under which no buffer is registered are ignored.
    """

    def __init__(self, root: nn.Module, names: Collection[str]) -> None:
        self._places: dict[str, tuple[dict[str, Any], str, Tensor, Tensor]] = {}
        for name in names:
            path, _, key = name.rpartition(".")
            buffers = own_buffers(root.get_submodule(path))
            buffer = buffers.get(key)
            if buffer is not None and not is_remote(buffer):
                self._places[name] = (buffers, key, buffer, buffer.detach().clone())

    def current(self) -> dict[str, Tensor]:
        """Return copies of the buffers' current values, by name."""
        return {name: buffers[key].detach().clone() for name, (buffers, key, _, _) in self._places.items()}

    def restore(self, except_prefixes: tuple[str, ...] = ()) -> None:
        """Restore the buffers to their values before the step.

        Args:
            except_prefixes: Prefixes of names; buffers whose names begin with one of them are left unchanged.
        """
        self.set({name: value for name, (*_, value) in self._places.items() if not name.startswith(except_prefixes)})

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers to ``values``, which are given by name."""
        for name, value in values.items():
            buffers, key, buffer, _ = self._places[name]
            buffer.copy_(value)
            buffers[key] = buffer  # The step may have registered another tensor under this name.
