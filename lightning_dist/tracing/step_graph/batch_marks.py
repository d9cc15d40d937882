"""Find out which buffers a step changes, and whether their new values depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_dist._compat import NORM, DispatchMode, tree_leaves, version_of, written_arguments

__all__ = ["BatchMarks"]


class BatchMarks(DispatchMode):  # type: ignore[no-untyped-call]
    """Mark the storages of fake tensors that depend on the batch, while a step runs on fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The storages are kept alive here, so that no other storage gets the same address.
        self._marked: dict[StorageWeakRef, torch.UntypedStorage] = {}
        self._buffers: dict[str, tuple[Tensor, int]] = {}

    def begin(self, root: nn.Module) -> None:
        """Record the buffers of ``root``, which are fake tensors now, and their versions."""
        self._buffers = {name: (buffer, version_of(buffer)) for name, buffer in root.named_buffers()}

    def mark(self, tensor: Tensor) -> None:
        """Mark ``tensor`` as dependent on the batch."""
        storage = tensor.untyped_storage()
        self._marked[_key_of(storage)] = storage

    def is_marked(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` depends on the batch."""
        return _key_of(tensor.untyped_storage()) in self._marked

    def changed(self, root: nn.Module) -> dict[str, bool]:
        """Find the buffers of ``root`` that were changed since :meth:`begin`.

        Returns:
            For each changed buffer, by name, whether it depends on the batch. The running statistics of a module in
            training mode count as changed and dependent, because their kernels do not increment the version.
        """
        norms = {name for name, module in root.named_modules() if isinstance(module, NORM) and module.training}
        found = {}
        for name, buffer in root.named_buffers():
            before, version = self._buffers.get(name, (None, 0))
            if name.rpartition(".")[0] in norms:
                found[name] = True
            elif before is not None and (buffer is not before or version_of(buffer) != version):
                found[name] = self.is_marked(buffer)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(self.is_marked, given)):
            for tensor in [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]:
                self.mark(tensor)
            for tensor in tree_leaves(written_arguments(func, args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.mark(tensor)
        return out


def _key_of(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a key that is equal for all Python objects of one storage, even of a fake one, which has no memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
