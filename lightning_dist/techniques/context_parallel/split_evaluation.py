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
from lightning_dist.techniques.context_parallel.plan import ContextPlan, SequenceSplitError, SplitBlock
from lightning_dist.techniques.context_parallel.split_arguments import describe_options, is_cache, split_arguments
from lightning_dist.techniques.context_parallel.split_tokens import SplitTokens
from lightning_dist.techniques.context_parallel.tokens import Tokens

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
        self._whole_only: set[str] = set()
        """Names of the blocks that have been found not to compute the same on parts of the sequence."""
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
        is_in_training_chain: Callable[[], bool],
    ) -> None:
        """Replace the forward of ``block`` by one that splits its arguments, so that all hooks see whole values.

        Args:
            block: A block of a chain.
            name: Its name in the plan.
            is_first: Whether it is the first block of its chain.
            stays_split: Whether its hidden states are not gathered, because another block or a head continues on them.
            inside: Function that makes the context in which the block runs on the given tokens.
            is_in_training_chain: Function that returns whether a training step has split the arguments already.
        """
        forward = block.forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            is_split = self.is_running and is_evaluated(block) and not is_in_training_chain()
            tokens = self._tokens_for(block, name, args, kwargs, is_first) if is_split else None
            output = None if tokens is None else self._on_tokens(forward, name, args, kwargs, tokens, inside)
            if tokens is None or output is None:
                args, kwargs = _with_whole((args, kwargs), name)
                return forward(*args, **kwargs)
            dim = self._plan.blocks[name].dim
            first, *others = (output,) if isinstance(output, Tensor) else output
            hidden = SplitTokens(first, tokens, dim) if stays_split else tokens.gather(first, dim)
            return hidden if isinstance(output, Tensor) else (hidden, *others)

        block.forward = run

    def _on_tokens(
        self,
        forward: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tokens: Tokens,
        inside: Callable[[Tokens], AbstractContextManager[None]],
    ) -> Any:
        """Return what a block returns for this rank's tokens; None: it must run on the whole sequence."""
        split = self._plan.blocks[name]
        hidden = _hidden_states(args, kwargs, split)
        # Other blocks may have returned the other arguments.
        args, kwargs = _with_whole((args, kwargs), name, but=hidden if _tokens_of(hidden, split.dim) else None)
        if isinstance(hidden, SplitTokens):
            own = hidden.local if _tokens_of(hidden, split.dim) else tokens.split(hidden.whole(name), split.dim)
        else:
            own = tokens.split(hidden, split.dim)
        try:
            args, kwargs = split_arguments(args, kwargs, split, tokens, own)
            with inside(tokens):
                output = forward(*args, **kwargs)
        except SequenceSplitError as error:
            self._warn(name, f"cannot run on parts of it: {error}", "size")
            return None
        except Exception as error:
            error.add_note(
                f"{name} has raised this on a part of the sequence in an evaluation. If it does not raise it on the"
                " whole sequence, set split_evaluations=False."
            )
            raise
        if not isinstance(output, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(output)[1:])):
            self._whole_only.add(name)
            self._warn(name, "returns other tensors besides hidden states, of which each rank would have a part")
            return None
        return output

    def _tokens_for(
        self, block: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_first: bool
    ) -> Tokens | None:
        """Return this rank's tokens for a call of a block; None: it runs on the whole sequence."""
        split = self._plan.blocks[name]
        hidden = _hidden_states(args, kwargs, split)
        if name in self._whole_only:
            return None
        if not isinstance(hidden, Tensor) or hidden.is_nested or hidden.ndim < -split.dim:
            self._warn(name, "is not given hidden states as one tensor, or in another argument than in the first step")
            return None
        tokens = _tokens_of(hidden, split.dim)
        length = hidden.size(split.dim)
        if tokens is None and is_first:
            tokens = Tokens(length, self._group, is_balanced=self._plan.attention == "all_gather")
        if tokens is None:
            return None
        if why_not := self._why_not(block, args, kwargs, self._plan.options[name]):
            self._warn(name, why_not)
            return None
        if tokens.own < 2 or length < self._group.size():
            self._warn(name, f"has {length} tokens as input, which are too few to be split", "few")
            return None
        return tokens

    def _why_not(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Mapping[str, str]
    ) -> str:
        """Return the reason why a block runs on the whole sequence; empty: it runs on a part of it."""
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            return "is given a cache of keys and values. If no text is generated, pass use_cache=False"
        if any(module.training for module in block.modules()):
            return "has layers in training mode, which may draw random numbers for the whole sequence"
        options = describe_options(args, kwargs)
        for key in sorted(options.keys() | expected.keys()):
            if options.get(key) != expected.get(key):
                given, before = (each.get(key, "None or a tensor") for each in (options, expected))
                return f"is given {key}={given}, and {before} in the first step. If you can, call the model as there"
        return ""

    def _warn(self, name: str, why_not: str, kind: str = "") -> None:
        """Warn once of each reason on rank 0; reasons of the same ``kind`` count as one."""
        if (kind or why_not) in self._warned or dist.get_rank():
            return
        self._warned.add(kind or why_not)
        warnings.warn(
            f"split_evaluations=True: {name} runs on whole sequences in an evaluation, since it {why_not}.",
            stacklevel=2,
        )


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], split: SplitBlock) -> Any:
    """Return the hidden states among a block's arguments; None: they are not where the plan has found them."""
    if isinstance(split.hidden, str):
        return kwargs.get(split.hidden)
    return args[split.hidden] if split.hidden < len(args) else None


def _tokens_of(hidden: Any, dim: int) -> Tokens | None:
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
