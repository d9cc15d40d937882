"""Find where hidden states can be split along the sequence, from the record of a step, and confirm it by trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from lightning_dist._compat import NORM
from lightning_dist.techniques.tensor_parallel.plan import Entry, SplitSequence, is_inside
from lightning_dist.techniques.tensor_parallel.trial import BLOCK
from lightning_dist.tracing.step_graph import Dataflow, argument_of, find_chains, hidden_key
from lightning_dist.tracing.step_graph.dataflow import Call, is_stream

__all__ = ["SequenceFinder"]

Difference = Callable[[str, Mapping[str, Entry], Mapping[str, Mapping[str, int]], SplitSequence | None], str]
"""Function that splits a block and returns how its results differ from the whole block's; empty: they do not differ.

It is given the block's name, entries, sizes and split sequence. In the split sequence, the block's name is
:data:`~lightning_dist.techniques.tensor_parallel.trial.BLOCK`.
"""


class SequenceFinder:
    """Find chains of blocks whose hidden states can be split, and the modules in them that need all tokens.

    Args:
        blocks: The model's blocks, by full name.
        dataflow: The record of a step of the model.
        num_ranks: Number of ranks that tokens are split over.
        sharing: Names of the blocks with a parameter that is also held outside of the block.
        difference: Function that tries a block; see :data:`Difference`.
        hooked_inside: Function that returns the name of a module with a user's hook inside of a block; empty: there is
            none.
        attention: Names of layers that are given the output of an attention.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        dataflow: Dataflow,
        num_ranks: int,
        sharing: Collection[str],
        difference: Difference,
        hooked_inside: Callable[[str], str],
        attention: Collection[str] = (),
    ) -> None:
        self._attention = attention
        self._hooked_inside = hooked_inside
        self._blocks = blocks
        self._dataflow = dataflow
        self._num_ranks = num_ranks
        self._sharing = sharing
        self._difference = difference
        self._calls = dataflow.first_calls()

    def find(
        self, entries: Mapping[str, Entry], sizes: Mapping[str, Mapping[str, int]]
    ) -> tuple[SplitSequence | None, str]:
        """Find where hidden states can be split along the sequence.

        Args:
            entries: The entries of the plan, by full module name.
            sizes: The ``sizes`` of the :class:`~lightning_dist.techniques.tensor_parallel.plan.Plan`.

        Returns:
            A pair: where hidden states are split, or None if nowhere; and the reasons why they are not split in other
            chains of blocks, or an empty text.
        """
        dataflow = self._dataflow
        counts = Counter(call.name for call in dataflow.calls if call.name in self._blocks)
        chains, found, whys = [], SplitSequence((), {}, {}), []
        for chain in find_chains(dataflow, self._blocks):
            of_chain = SplitSequence((tuple(chain),), {}, {})
            why = ""
            for name in chain:
                why = f"{name} runs more than once in a step" if counts[name] > 1 else self._why_whole(name, entries)
                one = None
                if not why:
                    one, why = self._of_block(name, entries, sizes)
                if one is None:
                    break
                of_chain = _joined(of_chain, one)
            if why:
                whys.append(why)
                continue
            chains.append(tuple(chain))
            found = _joined(found, of_chain)
        why_not = "; ".join(dict.fromkeys(whys))
        if not chains:
            return None, why_not or "there are no blocks"
        return replace(found, chains=tuple(chains)), why_not

    def _why_whole(self, name: str, entries: Mapping[str, Entry]) -> str:
        """Return why the block ``name`` must see all tokens, as far as this is known without a trial; or nothing."""
        if name in self._sharing:
            return f"{name} shares parameters with modules outside of it"
        if any(getattr(module, "gradient_checkpointing", False) for module in self._blocks[name].modules()):
            return "the model checkpoints by itself; use activation_checkpointing=True of the strategy"
        if any(isinstance(module, NORM) for module in self._blocks[name].modules()):
            return f"{name} has a norm whose statistics are over all tokens"
        if any(is_inside(key, name) and entry.style == "attention_heads" for key, entry in entries.items()):
            return f"{name} has an nn.MultiheadAttention, which computes with all tokens"
        if hooked := self._hooked_inside(name):
            return f"{hooked} has a hook, which would see some of the tokens"
        if self._dataflow.leaks.get(name):
            return f"the step uses a value that {name} computes but does not return"
        if name in self._dataflow.draws_per_sample:
            return f"{name} draws random numbers that hold for all tokens of a sample"
        return ""

    def _of_block(
        self, name: str, entries: Mapping[str, Entry], sizes: Mapping[str, Mapping[str, int]]
    ) -> tuple[SplitSequence | None, str]:
        """Find out how hidden states can be split inside one block, and try the result.

        Returns:
            A pair: where hidden states are split, or None if that is not possible; and the reason in that case, or an
            empty text.
        """
        call = self._calls[name]
        kind, stream = type(self._blocks[name]).__name__, hidden_key(call)
        if stream is None:
            return None, f"{kind} has no floating-point argument of the shape of its output"
        hidden = argument_of(call, stream)
        of_block = {key: entry for key, entry in entries.items() if key.startswith(f"{name}.")}
        rows = [key for key, entry in of_block.items() if entry.style == "rowwise"]
        if not rows:
            return None, f"nothing in {kind} is split"
        if hidden.ndim < 3:
            return None, f"the input of {kind} has no dimension of tokens"
        if hidden.size(-2) % self._num_ranks:
            return None, f"the {hidden.size(-2)} tokens of {kind} do not divide by tp_size={self._num_ranks}"
        regions: dict[str, tuple[int | str, ...]] = {}
        layers: set[str] = set()
        for row in rows:
            cols = [col for col in self._dataflow.input_sources[row] if col in of_block]
            around = _around((row, *cols))
            if len(around) > len(name) and around in self._calls and around != row:
                keys = _arguments_like(self._calls[around], hidden)
                if keys:
                    regions[around] = keys
                    continue
            layers |= {col for col in cols if _arguments_like(self._calls[col], hidden)}
        for row in self._attention:  # A trial finds this as well, but not where tensors have no values.
            is_whole = (
                is_inside(row, name) and row not in rows and not any(is_inside(row, region) for region in regions)
            )
            if is_whole:
                return None, f"{kind}: {row} is given the output of an attention that is not split"
        sequence = SplitSequence(((name,),), {name: stream}, regions, tuple(sorted(layers)))
        in_trial = SplitSequence(
            ((BLOCK,),),
            {BLOCK: stream},
            {BLOCK + key[len(name) :]: value for key, value in regions.items()},
            tuple(BLOCK + key[len(name) :] for key in sorted(layers)),
        )
        its_sizes = {key: value for key, value in sizes.items() if key == name or key.startswith(f"{name}.")}
        error = self._difference(name, of_block, its_sizes, in_trial)
        return (None, f"{kind}: {error}") if error else (sequence, "")


def _around(names: Sequence[str]) -> str:
    """Return the name of the innermost module that contains every module of ``names``; a module contains itself."""
    parts = [name.split(".") for name in names]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in common)


def _arguments_like(call: Call, hidden: Tensor) -> tuple[int | str, ...]:
    """Return the arguments that seem to be computed from the hidden states token by token (see ``is_stream``)."""
    named: Sequence[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    return tuple(key for key, value in named if isinstance(value, torch.Tensor) and is_stream(value, hidden))


def _joined(first: SplitSequence, second: SplitSequence) -> SplitSequence:
    """Return ``first`` with the streams, regions and layers of both."""
    return replace(
        first,
        streams={**first.streams, **second.streams},
        regions={**first.regions, **second.regions},
        layers=first.layers + second.layers,
    )
