"""Keep the random numbers of ranks equal that must draw the same ones."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lightning_dist.collectives import begin_is_same_number
from lightning_dist.own_generators import get_state, own_generators, set_state
from lightning_dist.randomness import digest_of_states, rng_state, set_rng_state

__all__ = ["SameRandomNumbers", "agree_on_random_numbers"]


def agree_on_random_numbers(group: dist.ProcessGroup, module: nn.Module) -> None:
    """Set the generators of all ranks of ``group`` to the states of its first rank.

    This is a collective over ``group``.

    Args:
        group: Process group of the ranks that must draw the same random numbers.
        module: The user's module; generators that are attributes of it or of its submodules are included.
    """
    own = dict(own_generators(module))
    states = [(rng_state(), {name: get_state(generator) for name, generator in own.items()})]
    dist.broadcast_object_list(states, group=group, group_src=0)
    state, of_own = states[0]
    set_rng_state(state)
    for name, generator in own.items():
        if name in of_own:
            set_state(generator, of_own[name])


class SameRandomNumbers:
    """Keep the states of generators equal on ranks that must draw the same random numbers.

    They become different if code that runs on only one rank draws numbers, for example to plot samples of a model.

    Args:
        group: Process group of these ranks. Its backend must be gloo, because the compared digests are on the CPU.
        module: The user's module; generators that are attributes of it or of its submodules are included.
    """

    def __init__(self, group: dist.ProcessGroup, module: nn.Module) -> None:
        self._group = group
        self._module = module

    def restore(self) -> None:
        """Give all ranks the states of the first rank, if they differ. This is a collective over the group."""
        if not begin_is_same_number(digest_of_states(), self._group)():
            agree_on_random_numbers(self._group, self._module)
