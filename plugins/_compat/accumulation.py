"""Change the number of batches whose gradients are added up between the optimizer steps of a fit.

Lightning takes a batch for the first one of a step if its index is a multiple of ``accumulate_grad_batches``, so that
this number cannot change within an epoch. Here it is a number that counts from the first batch of the running step. A
function that loops ask for the number of batches of the next step could replace this module.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_dist.plugins._compat.loops import around_every_batch, num_fetched

__all__ = ["change_accumulation", "configured_accumulation"]


class _AccumulatedBatches(int):
    """Be the number of batches of a step, of which an index in the epoch is a multiple if a step begins or ends there.

    Args:
        number: The number of batches.
        first: Index in the epoch of the first one.
        configured: The number that the user gave to the Trainer.
    """

    first: int
    configured: int

    def __new__(cls, number: int, first: int, configured: int) -> _AccumulatedBatches:
        """Return the number."""
        made = super().__new__(cls, number)
        made.first, made.configured = first, configured
        return made

    def __reduce__(self) -> tuple[type[_AccumulatedBatches], tuple[int, int, int]]:
        """Return what a copy is made of."""
        return type(self), (int(self), self.first, self.configured)

    def __rmod__(self, index: int) -> int:
        """Return ``index % self``, counted from the first batch of the step."""
        return (index - self.first) % int(self)


def change_accumulation(trainer: Trainer, choose: Callable[[], int]) -> Callable[[], None]:
    """Let a function choose before each optimizer step how many batches it accumulates, and return one that undoes it.

    ``trainer.accumulate_grad_batches`` is the number of the running step.

    Args:
        trainer: The Trainer, before its fit trains.
        choose: Function that returns the number of batches of the step that begins. It is called before the first of
            them is fetched.
    """
    configured = trainer.accumulate_grad_batches

    def before_batch() -> None:
        running, index = trainer.accumulate_grad_batches, num_fetched(trainer)
        has_begun = isinstance(running, _AccumulatedBatches) and index > running.first
        if not has_begun or index % running == 0:
            trainer.accumulate_grad_batches = _AccumulatedBatches(choose(), index, configured)

    def undo() -> None:
        around_every_batch(trainer, "accumulation", lambda: None)
        trainer.accumulate_grad_batches = configured

    around_every_batch(trainer, "accumulation", before_batch)
    return undo


def configured_accumulation(trainer: Trainer) -> int:
    """Return ``accumulate_grad_batches`` as the user gave it, which may not be that of the running step."""
    number = trainer.accumulate_grad_batches
    return number.configured if isinstance(number, _AccumulatedBatches) else number
