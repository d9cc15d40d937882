"""Keep the random numbers of ranks equal that must draw the same ones."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from lightning_dist.mesh.collectives import begin_are_same_numbers
from lightning_dist.mesh.objects import broadcast_object
from lightning_dist.model.own_generators import get_state, own_generators, set_state
from lightning_dist.model.randomness import digest_of_states, rng_state, set_rng_state

__all__ = ["DifferentNumbersError", "SameRandomNumbers", "agree_on_random_numbers"]


class DifferentNumbersError(RuntimeError):
    """Report that a step ran with different random numbers on ranks that must draw the same ones."""


def agree_on_random_numbers(group: dist.ProcessGroup, module: nn.Module) -> None:
    """Set the generators of all ranks of ``group`` to the states of its first rank.

    This is a collective over ``group``.

    Args:
        group: Process group of the ranks that must draw the same random numbers.
        module: The user's module; generators that are attributes of it or of its submodules are included.
    """
    own = dict(own_generators(module))
    states = rng_state(), {name: get_state(generator) for name, generator in own.items()}
    state, of_own = broadcast_object(states, group)
    set_rng_state(state)
    for name, generator in own.items():
        if name in of_own:
            set_state(generator, of_own[name])


class SameRandomNumbers:
    """Keep the states of generators equal on ranks that must draw the same random numbers.

    They become different if code that runs on only one rank draws numbers, for example to plot samples of a model.
    Therefore the ranks begin to compare their states after the last hook of a batch, and finish before the next batch
    is fetched. If the states differ, all ranks take those of the first one. Between these two points, all ranks draw
    the same numbers, unless changes are expected, as in a validation; then the ranks compare once more. Numbers that
    are drawn there on some ranks alone are found when the next comparison ends, and are an error.

    Args:
        group: Process group of these ranks. Its backend must be gloo, because the compared digests are on the CPU.
        module: The user's module; generators that are attributes of it or of its submodules are included.
    """

    def __init__(self, group: dist.ProcessGroup, module: nn.Module) -> None:
        self._group = group
        self._module = module
        self._comparison: Callable[[], list[bool]] | None = None
        self._digest = 0
        """The digest of the states with which the batch began."""

    def expect_changes(self) -> None:
        """Compare the states once more before the next batch. All ranks must call this at the same time."""
        self._finish()

    def restore(self) -> None:
        """Give all ranks the states of the first rank before a batch, if they differ.

        This is a collective over the group.

        Raises:
            DifferentNumbersError: If the states differed when the last batch began.
        """
        is_same = self._finish()
        if is_same is None:
            (is_same,) = begin_are_same_numbers([digest_of_states()], self._group)()
        if not is_same:
            agree_on_random_numbers(self._group, self._module)
        self._digest = digest_of_states()

    def begin_comparing(self) -> None:
        """Begin to compare the states after a batch. This is a collective over the group."""
        self._comparison = begin_are_same_numbers([self._digest, digest_of_states()], self._group)

    def _finish(self) -> bool | None:
        """Finish the comparison, and return whether the states were the same after the batch; None: there is none.

        Raises:
            DifferentNumbersError: If the states differed when the batch began.
        """
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return None
        began_same, ended_same = comparison()
        if not began_same:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
            raise DifferentNumbersError(
                f"The ranks {ranks} must draw the same random numbers, and began the last batch with different states"
                " of random number generators: code that runs between two batches on some of them only, such as a"
                " logger's or that of a learning-rate scheduler, has drawn numbers. Use a generator of its own there,"
                " such as random.Random()."
            )
        return ended_same
