"""How a rank's batch is split into microbatches: by the module's own hook, or along dimension 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_dist.pipeline import batch_size_of, check_divides, num_microbatches_for, split_batch

__all__ = ["BatchSplitter"]


class BatchSplitter:
    """Splits the batches of ``module``.

    A module may define ``split_batch(batch, num_microbatches)``, which returns a list of microbatches, for batches
    whose samples are not along dimension 0 of every tensor.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._name = type(module).__name__
        self._hook: Callable[[Any, int], Sequence[Any]] | None = getattr(module, "split_batch", None)
        # In training, BatchNorm has no statistics of a single sample.
        self._least = 2 if any(isinstance(part, _BatchNorm) and part.training for part in module.modules()) else 1

    def choose_number(self, batch: Any, wanted: int | None, most: int) -> int:
        """Return into how many microbatches a full batch is split.

        Args:
            batch: The batch that a rank has.
            wanted: The number that was asked for; None: none was.
            most: The greatest number that is chosen where none was asked for.

        Raises:
            ValueError: If the batch cannot be split, or not into ``wanted`` microbatches.
        """
        if self._hook is not None:
            return len(self.split(batch, most if wanted is None else wanted))
        size = self._size(batch)
        if wanted is None:
            return num_microbatches_for(size, max(min(most, size // self._least), 1))
        check_divides(size, wanted)
        return wanted

    def split(self, batch: Any, wanted: int) -> list[Any]:
        """Return ``batch`` as microbatches: ``wanted``, or fewer where an epoch's smaller last batch has no more.

        Raises:
            ValueError: If the batch cannot be split.
        """
        if self._hook is not None:
            parts = list(self._hook(batch, wanted))
            if not 0 < len(parts) <= wanted:
                raise ValueError(
                    f"{self._name}.split_batch returned {len(parts)} microbatches where {wanted} were asked for: it"
                    " must return a list of at least one and at most as many."
                )
            return parts
        size = self._size(batch)
        return split_batch(batch, num_microbatches_for(size, max(min(wanted, size // self._least), 1)))

    def num_samples(self, microbatch: Any) -> int:
        """Return the number of samples of a microbatch, by which what is logged is weighted."""
        try:
            return batch_size_of(microbatch) or 1
        except ValueError:  # one that only the module's hook can split
            return 1

    def _size(self, batch: Any) -> int:
        size = batch_size_of(batch)
        if size == 0:
            raise ValueError(
                f"The batch is a {type(batch).__name__} in which a pipeline finds no samples to split into"
                " microbatches. Make it a tensor, or a dict, list, tuple or dataclass of tensors; or give its class"
                " __len__ (the number of samples) and __getitem__ (which takes a slice of them); or define"
                f" split_batch(batch, num_microbatches) on {self._name}, which returns a list of microbatches."
            )
        return size
