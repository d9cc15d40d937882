"""Find the buffers that a step changes, tell whether they depend on the batch, and restore them.

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
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["BatchMarks", "BuffersOfStep"]


class BatchMarks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mark the storages of fake tensors that depend on the batch, while a step runs on fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The storages are kept alive here, so that no other storage gets the same address.
        self._marked: dict[int, torch.UntypedStorage] = {}
        self._buffers: dict[str, tuple[Tensor, int]] = {}

    def begin(self, root: nn.Module) -> None:
        """Record the buffers of ``root``, which are fake tensors now, and their versions."""
        self._buffers = {name: (buffer, buffer._version) for name, buffer in root.named_buffers()}

    def mark(self, tensor: Tensor) -> None:
        """Mark ``tensor`` as dependent on the batch."""
        storage = tensor.untyped_storage()
        self._marked[storage._cdata] = storage

    def is_marked(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` depends on the batch."""
        return tensor.untyped_storage()._cdata in self._marked

    def changed(self, root: nn.Module) -> dict[str, bool]:
        """Find the buffers of ``root`` that were changed since :meth:`begin`.

        Returns:
            For each changed buffer, by name, whether it depends on the batch. The running statistics of a module in
            training mode count as changed and dependent, because their kernels do not increment the version.
        """
        norms = {name for name, module in root.named_modules() if isinstance(module, _NormBase) and module.training}
        found = {}
        for name, buffer in root.named_buffers():
            before, version = self._buffers.get(name, (None, 0))
            if name.rpartition(".")[0] in norms:
                found[name] = True
            elif before is not None and (buffer is not before or buffer._version != version):
                found[name] = self.is_marked(buffer)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(self.is_marked, given)):
            for tensor in [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]:
                self.mark(tensor)
            if func._schema.is_mutable:
                names = [argument.name for argument in func._schema.arguments if _is_written(argument)]
                by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
                by_name.update(kwargs or {})
                for tensor in tree_leaves([by_name.get(name) for name in names]):
                    if isinstance(tensor, Tensor):
                        self.mark(tensor)
        return out


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


class BuffersOfStep:
    """Hold copies of buffers from before a step, and restore them.

    Buffers on the meta device are left out.

    Args:
        root: The user's module.
        names: The names of the buffers.
    """

    def __init__(self, root: nn.Module, names: Collection[str]) -> None:
        self._places: dict[str, tuple[dict[str, Any], str, Tensor, Tensor]] = {}
        for name in names:
            path, _, key = name.rpartition(".")
            buffers = root.get_submodule(path)._buffers
            buffer = buffers.get(key)
            if buffer is not None and not buffer.is_meta:
                self._places[name] = (buffers, key, buffer, buffer.detach().clone())

    def current(self) -> dict[str, Tensor]:
        """Return copies of the buffers' current values, by name."""
        return {name: buffers[key].detach().clone() for name, (buffers, key, _, _) in self._places.items()}

    def restore(self, outside_of: tuple[str, ...] = ()) -> None:
        """Restore the buffers to their values before the step.

        Args:
            outside_of: Prefixes of names; buffers whose names begin with one of them are left unchanged.
        """
        self.set({name: value for name, (*_, value) in self._places.items() if not name.startswith(outside_of)})

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers to ``values``, which are given by name."""
        for name, value in values.items():
            buffers, key, buffer, _ = self._places[name]
            buffer.copy_(value)
            buffers[key] = buffer  # The step may have registered another tensor under this name.
