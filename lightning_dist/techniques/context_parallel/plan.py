"""Represent how a model's sequence is split over ``cp``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["ATTENTIONS", "AttentionKind", "ContextPlan", "SequenceSplitError", "SplitBlock"]

ATTENTIONS = ("auto", "ulysses", "all_gather")
"""How the ranks exchange what attention needs: heads for tokens, or all keys and values; auto chooses."""


class AttentionKind(IntEnum):
    """Say of which inputs of an attention each rank has its own tokens only."""

    NONE = 0
    QUERIES = 1
    ALL = 2


class SequenceSplitError(ValueError):
    """Report that the sequence of a model or of a batch cannot be split over ``cp``."""


@dataclass(frozen=True)
class SplitBlock:
    """Represent how the arguments of a block are split.

    Args:
        hidden: Position or name of the argument with the hidden states.
        dim: The negative dimension of the hidden states along which the tokens lie.
        dims: For other tensors among the arguments, the dimension along which they are split; None: every rank gets the
            whole tensor. A tensor is identified by the argument's position or name and by its index among the
            argument's tensors. Tensors that are not named follow :func:`~.split_arguments.dim_of_tokens`.
        num_positions: How often code inside of the block asks for the positions of its tokens; None: it is not known.
        kinds: The kinds of the block's attentions in their order; None: they are not known.
    """

    hidden: int | str
    dim: int
    dims: Mapping[tuple[int | str, int], int | None] = field(default_factory=dict)
    num_positions: int | None = None
    kinds: tuple[AttentionKind, ...] | None = None


@dataclass(frozen=True)
class ContextPlan:
    """Represent the plan by which the blocks of a model run on parts of the sequence.

    Args:
        chains: Names of the blocks in each chain. The first block's hidden states are split, and the last block's
            output is gathered.
        blocks: How the arguments of each block are split, by the block's name.
        attention: ``"ulysses"`` or ``"all_gather"``.
        draws: For each chain, whether ranks draw different random numbers while its blocks run.
        after: Names of the modules after the last chain, such as a norm and a head, that compute token by token.
        options: For each block, what it was given in the traced step
            (see :func:`~.split_arguments.describe_options`).
    """

    chains: tuple[tuple[str, ...], ...]
    blocks: Mapping[str, SplitBlock]
    attention: str
    draws: tuple[bool, ...]
    after: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def outline(self) -> str:
        """Return a text that is equal on all ranks that have the same plan."""
        blocks, options = sorted(self.blocks.items()), sorted(self.options.items())
        return repr((self.chains, blocks, self.attention, self.draws, self.after, options))
