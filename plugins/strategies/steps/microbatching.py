"""Split a rank's batch into microbatches, by the module's own hook or along dimension 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_dist._compat import NORM
from lightning_dist.techniques.pipeline import (
    SPLIT_BY_HAND,
    batch_size_of,
    check_divides,
    greatest_divisor,
    split_batch,
)

__all__ = ["BatchSplitter"]


_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class BatchSplitter:
    """Split the batches of ``module`` into microbatches.

    A module may define a method ``split_batch``, which is given a batch and the number of microbatches, and returns a
    list of them, for batches whose samples are not along dimension 0 of every tensor.

    Args:
        module: The user's module. If it has BatchNorm in training mode, each microbatch gets at least two samples.
    """

    def __init__(self, module: LightningModule) -> None:
        self._name = type(module).__name__
        self._hook: Callable[[Any, int], Sequence[Any]] | None = getattr(module, "split_batch", None)
        # In training, BatchNorm needs at least two samples for its statistics.
        norms = [part for part in module.modules() if isinstance(part, NORM) and not isinstance(part, _INSTANCE_NORMS)]
        self._least = 2 if any(norm.training for norm in norms) else 1

    def choose_number(self, batch: Any, wanted: int | None, most: int) -> int:
        """Return the number of microbatches into which a full batch is split.

        Args:
            batch: A full batch of this rank.
            wanted: The number that the user has set; None: the user has set none.
            most: The largest number that is chosen if the user has set none.

        Raises:
            ValueError: If the batch cannot be split, or not into ``wanted`` microbatches.
        """
        if self._hook is not None:
            return len(self.split(batch, most if wanted is None else wanted))
        size = self._size(batch)
        if wanted is None:
            return greatest_divisor(size, max(min(most, size // self._least), 1))
        check_divides(size, wanted)
        return wanted

    def split(self, batch: Any, wanted: int) -> list[Any]:
        """Split ``batch`` into ``wanted`` microbatches, or fewer if it is too small, as an epoch's last batch may be.

        Raises:
            ValueError: If the batch cannot be split, or the module's hook returns none or too many microbatches.
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
        return split_batch(batch, greatest_divisor(size, max(min(wanted, size // self._least), 1)))

    def sizes(self, microbatches: Sequence[Any]) -> list[int]:
        """Return the numbers of samples of microbatches from :meth:`split`, which are the weights of logged values."""
        if self._hook is None:  # All microbatches have the same size.
            return [_num_samples(microbatches[0])] * len(microbatches)
        return list(map(_num_samples, microbatches))

    def _size(self, batch: Any) -> int:
        """Return the number of samples of ``batch``.

        Raises:
            ValueError: If there are none.
        """
        size = batch_size_of(batch)
        if size == 0:
            raise ValueError(
                f"The batch is a {type(batch).__name__} in which a pipeline finds no samples to split into"
                " microbatches. Make it a tensor, or a dict, list, tuple or dataclass of tensors; or give its class"
                " __len__ (the number of samples) and __getitem__ (which takes a slice of them); or"
                f" {SPLIT_BY_HAND}."
            )
        return size


def _num_samples(microbatch: Any) -> int:
    try:
        return batch_size_of(microbatch) or 1
    except ValueError:  # Only the module's hook can split such a batch, so its number of samples is unknown.
        return 1
