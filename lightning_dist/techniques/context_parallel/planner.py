"""Find the plan by which a model's blocks run on parts of the sequence, from one step on fake tensors.

The length of the sequence is that of the queries of attention in the step. The dimension with that size in a block's
hidden states is the one of the tokens. Each kind of block is then tried on random inputs: its outputs and gradients on
parts of the sequence must be those of the original block on the whole sequence.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist._compat import NORM, tree_leaves
from lightning_dist.mesh.consensus import check_agreement
from lightning_dist.model.experts import without_dispatch
from lightning_dist.model.units import Unit
from lightning_dist.techniques.context_parallel.attention import is_attention
from lightning_dist.techniques.context_parallel.plan import (
    AttentionKind,
    ContextPlan,
    SequenceSplitError,
    SplitBlock,
)
from lightning_dist.techniques.context_parallel.split_arguments import describe_options, dim_of_tokens
from lightning_dist.techniques.context_parallel.tokens import Tokens
from lightning_dist.techniques.context_parallel.trial import Trial
from lightning_dist.techniques.options import FirstStep
from lightning_dist.tracing.block_trial import kind_of_block
from lightning_dist.tracing.planning import OncePerKind, first_that_fits
from lightning_dist.tracing.step_graph import Dataflow, argument_of, find_chains, hidden_key, record_step
from lightning_dist.tracing.step_graph.dataflow import Call
from lightning_dist.tracing.users_hooks import hooked_inside, hooked_modules

__all__ = ["find_context_plan"]

_TOKEN_BY_TOKEN = {nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh}
"""Classes that compute token by token, so that they need no trial, which takes long for the weights of a head."""

MAX_TRIES = 8
"""Maximum number of ways to split the arguments of a block that are tried."""


def find_context_plan(
    root: nn.Module,
    units: Sequence[Unit],
    attention: str,
    first: FirstStep,
    group: dist.ProcessGroup,
    device: torch.device,
    keeps_split: bool,
) -> ContextPlan:
    """Find the plan by which the blocks of ``root`` run on parts of the sequence.

    This is a collective over all processes.

    Args:
        root: The model, whose blocks are not changed yet.
        units: All units of the model; those of the kind ``block`` are its repeated blocks.
        attention: How attention sees other tokens: one of
            :data:`~lightning_dist.techniques.context_parallel.plan.ATTENTIONS`.
        first: The step to run on fake tensors.
        group: Process group of the ranks of ``cp``.
        device: This rank's device.
        keeps_split: Whether norms and heads after the blocks may compute on each rank's tokens.

    Raises:
        SequenceSplitError: If a block does not compute the same on parts of the sequence.
        OtherRankError: If ranks have found different plans.
    """
    size = group.size()
    blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
    if not blocks:
        raise SequenceSplitError(
            f"cp_size={size} splits the sequence between the model's repeated blocks, and {type(root).__name__} has"
            " none that could be found: name their classes as units=[...]."
        )
    if first.run is None:
        raise SequenceSplitError(f"cp_size={size} needs a step to find the sequence: {first.why_not}.")
    with without_dispatch(root):
        flow, why_not = record_step(
            lambda: _AttentionFlow(frozenset(blocks), root, lambda *_: True), root, first.run, device
        )
    plan = _Finder(root, blocks, flow, why_not, group, device).plan(attention, keeps_split)
    gc.collect()  # The trials hold copies of blocks, whose modules and hooks are in reference cycles.
    check_agreement("The plan of context parallelism", plan.outline())
    return plan


class _AttentionFlow(Dataflow):
    """Record the data flow of a step, and the attention in its blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.attention: dict[str, list[tuple[int, int]]] = {}
        """The number of tokens and of heads of the queries of each attention, by the name of the block."""

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record the shape of queries as well."""
        super().on_function(function, args, kwargs, out)
        if not is_attention(function):
            return
        query = args[0] if args else kwargs["query"]
        if function is torch.nn.functional.multi_head_attention_forward:  # Its tokens are along the first dimension.
            shape = (int(query.size(0)), int(args[4] if len(args) > 4 else kwargs["num_heads"]))
        else:
            shape = (int(query.size(-2)), int(query.size(-3)) if query.ndim > 2 else 1)
        for block in self.blocks.intersection(self.running):
            self.attention.setdefault(block, []).append(shape)


class _Finder:
    def __init__(
        self,
        root: nn.Module,
        blocks: Mapping[str, nn.Module],
        flow: _AttentionFlow,
        why_not: str,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._root = root
        self._blocks = blocks
        self._flow = flow
        self._why_not = why_not
        self._group = group
        self._device = device
        self._calls = flow.first_calls()
        self._answers = OncePerKind[tuple[SplitBlock | None, str]]()

    def plan(self, attention: str, keeps_split: bool) -> ContextPlan:
        if not self._flow.attention:
            why = f"a step could not be run on fake tensors: {self._why_not}" if self._why_not else (
                "none of its blocks calls F.scaled_dot_product_attention, and only that can be split. For a model of"
                " Hugging Face, use attn_implementation='sdpa'"
            )  # fmt: skip
            raise self._error(f"{type(self._root).__name__}: {why}")
        num_heads = {heads for shapes in self._flow.attention.values() for _, heads in shapes}
        size = self._group.size()
        if attention == "ulysses" and (uneven := sorted(heads for heads in num_heads if heads % size)):
            raise SequenceSplitError(
                f"attention='ulysses' with cp_size={size}: an attention has {uneven[0]} heads, which do not divide by"
                f" {size}. Use attention='all_gather' or 'auto', or a cp_size that divides {uneven[0]}."
            )
        if attention == "auto":
            attention = "all_gather" if any(heads % size for heads in num_heads) else "ulysses"
        chains: list[tuple[str, ...]] = []
        found: dict[str, SplitBlock] = {}
        for chain in find_chains(self._flow, self._blocks):
            # Blocks without attention, such as those of a convolutional stem, may run on whole sequences.
            if not self._flow.attention.keys().isdisjoint(chain):
                chains.append(tuple(chain))
                found |= {name: self._of_block(name, attention) for name in chain}
        for name in self._flow.attention.keys() - found.keys():
            raise self._error(f"{self._kind(name)} has no floating-point argument of the shape of its output")
        draws = tuple(self._flow.draws_per_sample.isdisjoint(chain) for chain in chains)
        after = self._after(chains[-1][-1], found[chains[-1][-1]], attention) if keeps_split else ()
        options = {name: describe_options(self._calls[name].args, self._calls[name].kwargs) for name in found}
        return ContextPlan(tuple(chains), found, attention, draws, after, options)

    def _kind(self, name: str) -> str:
        return f"{name} ({type(self._blocks[name]).__name__})"

    def _after(self, last: str, split: SplitBlock, attention: str) -> tuple[str, ...]:
        """Return the names of the modules after the block ``last`` that compute token by token."""
        last_call = self._calls[last]
        hidden = argument_of(last_call, split.hidden)
        hooked = hooked_modules(self._root, self._flow)
        found: list[str] = []
        for call in self._flow.calls[self._flow.calls.index(last_call) + 1 :]:
            if call.name in found or any(
                block == call.name or block.startswith(f"{call.name}.") for block in self._blocks
            ):
                continue
            tensors = list(_tensors_of(call))
            if not call.name or len(tensors) != 1 or not isinstance(call.output, Tensor):
                continue
            (key, _), given = tensors[0]
            if split.dim == -1 or given.ndim != hidden.ndim or call.output.ndim != hidden.ndim:
                continue
            if not given.shape[:-1] == hidden.shape[:-1] == call.output.shape[:-1]:
                continue
            module = self._root.get_submodule(call.name)
            if hooked_inside(call.name, hooked, itself=True) or self._flow.leaks.get(call.name):
                continue
            if type(module) not in _TOKEN_BY_TOKEN:
                trial = Trial(module, call, self._group, self._device)
                if trial.error or trial.difference(SplitBlock(key, split.dim), attention):
                    continue
            found.append(call.name)
        return tuple(name for name in found if not any(name.startswith(f"{other}.") for other in found))

    def _error(self, text: str) -> SequenceSplitError:
        return SequenceSplitError(
            f"cp_size={self._group.size()} cannot split the sequence: {text}. Use cp_size=1, or name the classes of the"
            " blocks that can be split as units=[...]."
        )

    def _of_block(self, name: str, attention: str) -> SplitBlock:
        """Find how the arguments of a block are split so that it computes the same.

        Raises:
            SequenceSplitError: If it does not compute the same on parts of the sequence.
        """
        block, call, used = self._blocks[name], self._calls[name], self._flow.used_later.get(name, set())
        if self._flow.runs_again(name):
            raise self._error(f"{self._kind(name)} runs more than once in a step")
        if any(getattr(module, "gradient_checkpointing", False) for module in block.modules()):
            raise self._error(
                f"{self._kind(name)} checkpoints activations by itself: use activation_checkpointing='full' of the"
                " strategy"
            )
        if any(isinstance(module, NORM) for module in block.modules()):
            raise self._error(f"{self._kind(name)} has a norm whose statistics are over all tokens")
        if functions := self._flow.uses_of_leaks(name):
            raise self._error(
                f"the step uses a value (in {functions}) that {self._kind(name)} computes but does not return,"
                " such as an attribute or what a hook has kept: each rank would compute it from its own tokens only"
            )
        if any(index > 0 for index in used):
            raise self._error(f"other code uses more of what {self._kind(name)} returns than the hidden states")
        split, why_not = self._answers.of(kind_of_block(block, name, call, used), lambda: self._tried(name, attention))
        if split is None:
            raise self._error(f"{self._kind(name)}: {why_not}")
        return split

    def _tried(self, name: str, attention: str) -> tuple[SplitBlock | None, str]:
        """Return how the arguments of a block are split so that it computes the same; else None and the reason."""
        call = self._calls[name]
        trial = Trial(self._blocks[name], call, self._group, self._device)
        if trial.error:
            return None, f"it could not be tried: {trial.error}"
        candidates = self._candidates(name, call)
        likeliest = next(candidates, None)
        if likeliest is not None and (too_few := self._too_few_tokens(call, likeliest, attention)):
            return None, too_few

        def attempt(split: SplitBlock) -> tuple[SplitBlock, str]:
            if too_few := self._too_few_tokens(call, split, attention):
                return split, too_few
            error = trial.difference(split, attention)
            found = replace(split, num_positions=trial.num_positions, kinds=trial.kinds)
            for index in self._doubtful(call, found, attention):
                kinds = *(found.kinds or ())[:index], AttentionKind.QUERIES, *(found.kinds or ())[index + 1 :]
                if not trial.difference(replace(found, kinds=kinds), attention):
                    found, error = replace(found, kinds=kinds), ""
            if not error and name in self._flow.attention and AttentionKind.ALL not in (found.kinds or ()):
                error = "its attention sees whole sequences, so that not the tokens were split"
            return found, error

        fitting, why_not = first_that_fits(
            itertools.chain(() if likeliest is None else (likeliest,), candidates), attempt
        )
        return fitting, "" if fitting is not None else self._explain(name, why_not)

    def _too_few_tokens(self, call: Call, split: SplitBlock, attention: str) -> str:
        """Return an error if the recorded call has too few tokens for a trial; empty: it has enough."""
        length = argument_of(call, split.hidden).size(split.dim)
        tokens = Tokens(length, self._group, is_balanced=attention == "all_gather")
        too_few = f"the {length} tokens of the first batch are too few to find how it can be split"
        return too_few if tokens.are_too_few else ""

    def _doubtful(self, call: Call, split: SplitBlock, attention: str) -> list[int]:
        """Return which attentions may have whole keys that are by chance as many as a rank's tokens.

        Args:
            call: The recorded call of the block.
            split: How its arguments are split, and the kinds of its attentions as their sizes look.
            attention: ``"ulysses"`` or ``"all_gather"``.
        """
        length = argument_of(call, split.hidden).size(split.dim)
        own = Tokens(length, self._group, is_balanced=attention == "all_gather").own
        wholes = (leaf for place, leaf in _tensors_of(call) if split.dims.get(place, 0) is None)
        if not any(own in leaf.shape for leaf in wholes):
            return []
        return [index for index, kind in enumerate(split.kinds or ()) if kind == AttentionKind.ALL]

    def _explain(self, name: str, error: str) -> str:
        """Return why a block does not compute the same on parts of the sequence, and what helps."""
        if name in self._flow.attention:
            return (
                f"on parts of the sequence, {error}. It may mix tokens otherwise than by scaled_dot_product_attention"
            )
        return (
            f"on parts of the sequence, {error or 'it has no dimension of tokens'}, and it does not call"
            " F.scaled_dot_product_attention, which is the only way to mix tokens that can be split. For a model of"
            " Hugging Face, use attn_implementation='sdpa'"
        )

    def _candidates(self, name: str, call: Call) -> Iterator[SplitBlock]:
        """Yield the ways to split the arguments of a block that are worth a trial, with the most likely one first."""
        key = hidden_key(call)
        assert key is not None
        hidden = argument_of(call, key)
        shapes = self._flow.attention.get(name) or [s for shapes in self._flow.attention.values() for s in shapes]
        lengths = list(dict.fromkeys(length for length, _ in shapes))
        options = [
            (length, dim)
            for length in lengths
            for dim in (-2, *range(-hidden.ndim, -2), -1)
            if -dim <= hidden.ndim and hidden.shape[dim] == length
        ]
        for length, dim in options:
            places, choices, shapes_of = [], [], []
            for place, leaf in _tensors_of(call):
                if place[0] == key:
                    continue
                sizes = [d - leaf.ndim for d, size in enumerate(leaf.shape) if size == length]
                first = dim if leaf.shape == hidden.shape else dim_of_tokens(leaf, length)
                places.append(place)
                choices.append(list(dict.fromkeys((first, None, *sizes))) if sizes else [None])
                shapes_of.append(leaf.shape)

            def likelihood(numbers: Sequence[int], shapes: Sequence[torch.Size] = tuple(shapes_of)) -> tuple[int, int]:
                """Prefer the same dimension for tensors of the same shape, such as cosines and sines of positions."""
                by_shape = set(zip(shapes, numbers, strict=True))
                return len(by_shape) - len(set(shapes)), sum(number for _, number in by_shape)

            likely = sorted(itertools.product(*(range(len(each)) for each in choices)), key=likelihood)
            for numbers in likely[:MAX_TRIES]:
                chosen = [each[number] for each, number in zip(choices, numbers, strict=True)]
                yield SplitBlock(key, dim, dict(zip(places, chosen, strict=True)))


def _tensors_of(call: Call) -> Iterator[tuple[tuple[int | str, int], Tensor]]:
    """Yield the tensors of a call's arguments, each with the argument it belongs to and its index in it."""
    named: Sequence[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in named:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            yield (key, index), tensor
