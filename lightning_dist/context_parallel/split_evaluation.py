"""Run blocks on this rank's part of the sequence in evaluations as well, if the user asks for it.

An evaluation may use what a training step does not: hidden states of inner blocks, caches of keys, other arguments. A
block therefore returns a :class:`~.split_tokens.SplitTokens`, from which the next block takes this rank's tokens, and
any other code gets whole hidden states. A block that is called otherwise than in the training step runs on the whole
sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist._compat import tree_leaves, tree_map
from lightning_dist.context_parallel.plan import ContextPlan, SequenceSplitError, SplitBlock
from lightning_dist.context_parallel.split_arguments import describe_options, is_cache, split_arguments
from lightning_dist.context_parallel.split_tokens import SplitTokens
from lightning_dist.context_parallel.tokens import Tokens

__all__ = ["SplitEvaluation", "is_evaluated"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


def is_evaluated(block: nn.Module) -> bool:
    """Return whether a block runs without gradients in an evaluation, which may use more than a training step does."""
    return not block.training and not torch.is_grad_enabled()


class SplitEvaluation:
    """Split the arguments of blocks in an evaluation, and wrap what they return.

    Args:
        plan: Description of what is split.
        group: Process group of the ranks of ``cp``.
    """

    def __init__(self, plan: ContextPlan, group: dist.ProcessGroup) -> None:
        self._plan = plan
        self._group = group
        self._warned: set[str] = set()
        self.is_running = False
        """Whether a validation, test or predict step runs now, for which all ranks have the same batch."""

    def add_to(
        self,
        block: nn.Module,
        name: str,
        is_first: bool,
        stays_split: bool,
        inside: Callable[[Tokens], AbstractContextManager[None]],
    ) -> None:
        """Replace the forward of ``block`` by one that splits its arguments, so that all hooks see whole values.

        Args:
            block: A block of a chain.
            name: Its name in the plan.
            is_first: Whether it is the first block of its chain.
            stays_split: Whether its hidden states are not gathered, because another block or a head continues on them.
            inside: Function that makes the context in which the block runs on the given tokens.
        """
        forward = block.forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running or not is_evaluated(block):
                return forward(*args, **kwargs)
            args, kwargs, tokens = self._split(name, args, kwargs, is_first)
            if tokens is None:
                return forward(*args, **kwargs)
            with inside(tokens):
                output = forward(*args, **kwargs)
            dim = self._plan.blocks[name].dim
            first, *others = (output,) if isinstance(output, Tensor) else output
            hidden = SplitTokens(first, tokens, dim) if stays_split else tokens.gather(first, dim)
            return hidden if isinstance(output, Tensor) else (hidden, *others)

        block.forward = run

    def _split(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_first: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Tokens | None]:
        """Return the arguments that a block runs with, and the tokens that they are for; None: all tokens."""
        split = self._plan.blocks[name]
        hidden = _hidden_states(args, kwargs, split)
        args, kwargs = _with_whole((args, kwargs), name, but=hidden)  # Other blocks may have returned other arguments.
        tokens = None
        if isinstance(hidden, Tensor) and not hidden.is_nested:
            tokens = _tokens_of(hidden, split.dim) or (self._begin(hidden, split) if is_first else None)
        if tokens is not None:
            why_not = self._why_not(args, kwargs, self._plan.options[name])
            if not why_not:
                own = hidden.local if isinstance(hidden, SplitTokens) else tokens.split(hidden, split.dim)
                try:
                    return *split_arguments(args, kwargs, split, tokens, own), tokens
                except SequenceSplitError as error:
                    why_not = str(error)
            self._warn(name, why_not)
        return *_with_whole((args, kwargs), name), None

    def _begin(self, hidden: Tensor, split: SplitBlock) -> Tokens | None:
        """Return the tokens of this rank of whole hidden states; None: there are too few."""
        length = hidden.size(split.dim)
        tokens = Tokens(length, self._group, is_balanced=self._plan.attention == "all_gather")
        return None if tokens.own < 2 or length < self._group.size() else tokens

    def _why_not(self, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Mapping[str, str]) -> str:
        """Return the reason why a block runs on the whole sequence; empty: it runs on a part of it."""
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            return "is given a cache of keys and values. If no text is generated, pass use_cache=False"
        options = describe_options(args, kwargs)
        for key in sorted(options.keys() | expected.keys()):
            if options.get(key) != expected.get(key):
                given, before = (each.get(key, "None or a tensor") for each in (options, expected))
                return (
                    f"is given {key}={given}, and {before} in the first training step. If you can, call the model as in"
                    " training"
                )
        return ""

    def _warn(self, name: str, why_not: str) -> None:
        if why_not not in self._warned and not dist.get_rank():
            self._warned.add(why_not)
            warnings.warn(
                f"split_evaluations=True: {name} runs on whole sequences in an evaluation, since it {why_not}.",
                stacklevel=2,
            )


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], split: SplitBlock) -> Any:
    """Return the hidden states among a block's arguments; None: they are not where the plan has found them."""
    if isinstance(split.hidden, str):
        return kwargs.get(split.hidden)
    return args[split.hidden] if split.hidden < len(args) else None


def _tokens_of(hidden: Tensor, dim: int) -> Tokens | None:
    """Return the tokens that this rank has of ``hidden``; None: its tokens are not those along ``dim``."""
    if not isinstance(hidden, SplitTokens) or hidden.is_flat or hidden.token_dim != dim % hidden.ndim:
        return None
    return hidden.tokens if hidden.kept == (0, hidden.tokens.length) else None


def _with_whole(arguments: Arguments, name: str, but: Any = None) -> Arguments:
    """Return the arguments of the block ``name`` with whole tensors in place of split ones, apart from ``but``."""
    if not any(isinstance(leaf, SplitTokens) for leaf in tree_leaves(arguments)):
        return arguments  # A cache among them stays the same object.

    def whole(value: Any) -> Any:
        return value.whole(name) if isinstance(value, SplitTokens) and value is not but else value

    return cast(Arguments, tree_map(whole, arguments))
