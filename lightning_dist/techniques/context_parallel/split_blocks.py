"""Run chains of blocks on this rank's part of the sequence, by hooks on the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist._compat import ForeignHooks
from lightning_dist.model.randomness import RankRng
from lightning_dist.techniques.context_parallel.inside_block import InsideBlock
from lightning_dist.techniques.context_parallel.plan import ContextPlan, SequenceSplitError
from lightning_dist.techniques.context_parallel.split_arguments import is_cache, split_arguments
from lightning_dist.techniques.context_parallel.split_evaluation import SplitEvaluation, is_evaluated
from lightning_dist.techniques.context_parallel.split_tokens import SplitTokens
from lightning_dist.techniques.context_parallel.tokens import Tokens

__all__ = ["SplitBlocks", "named_inside"]


class SplitBlocks:
    """Split hidden states before the first block of each chain, and gather them after the last one.

    Args:
        blocks: The blocks that this rank has, by the names that the plan uses.
        plan: Description of what is split.
        group: Process group of the ranks of ``cp``.
        random: Object that lets ranks draw different random numbers while the blocks run; None: they draw the same.
        evaluation: Object that splits evaluations; None: they run on whole sequences.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        plan: ContextPlan,
        group: dist.ProcessGroup,
        random: RankRng | None,
        evaluation: SplitEvaluation | None = None,
    ) -> None:
        self._plan = plan
        self._group = group
        self._random = random
        self._chain_of: dict[nn.Module, int] = {}
        self._tokens: list[Tokens | None] = []
        self._chains: list[tuple[str, str]] = []
        self._returned: dict[str, Tensor] = {}
        self._is_inside = False
        self.inside: InsideBlock | None = None
        """Object that has replaced functions in the last forward of a block."""
        self._names = {block: name for name, block in blocks.items()}
        self.is_disabled = False
        for chain, draws in zip(plan.chains, plan.draws, strict=True):
            for part in _local_parts(chain, blocks):
                index = len(self._chains)
                self._chains.append((part[0], part[-1]))
                self._tokens.append(None)
                for before, name in pairwise((None, *part)):
                    assert name is not None
                    self._chain_of[blocks[name]] = index
                    self._add_pre_hook(blocks[name], name, index, before, draws)
                for name in part[:-1]:
                    blocks[name].register_forward_hook(partial(self._remember, name), prepend=True)
                is_last = chain is plan.chains[-1] and part[-1] == chain[-1]
                stays_split = is_last and bool(plan.after)
                hook = self._gather_hook(index, plan.blocks[part[-1]].dim, stays_split)
                blocks[part[-1]].register_forward_hook(hook)
                if evaluation is not None:
                    self._split_evaluations(evaluation, {name: blocks[name] for name in part}, stays_split)
        for name in blocks.keys() - plan.blocks.keys():
            blocks[name].register_forward_pre_hook(partial(self._refuse_within_chain, name))

    def _add_pre_hook(self, block: nn.Module, name: str, index: int, before: str | None, draws: bool) -> None:
        split = self._plan.blocks[name]
        hooks = ForeignHooks(named_inside(name, block))

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.is_disabled:
                return None
            if before is None and is_evaluated(module):
                self._tokens[index] = None  # The whole chain runs as its first block does.
                return None
            if before is not None and self._tokens[index] is None:
                return None
            hidden = args[split.hidden] if isinstance(split.hidden, int) else kwargs[split.hidden]
            if before is None:
                self._tokens[index] = self._begin(module, hidden.size(split.dim), (*args, *kwargs.values()))
                if self._tokens[index] is not None and draws and self._random is not None and module.training:
                    # If the first block was recomputed and the last one was not, leave() was never called.
                    self._random.forget()
                    self._random.enter()
            tokens = self._tokens[index]
            if tokens is None:
                return None
            if hooked := hooks.find():
                raise SequenceSplitError(
                    f"cp_size={self._group.size()}: {hooked} has a hook, which each rank would call with its"
                    " own tokens only. Remove it before the training, or put it on a module outside of the blocks."
                )
            own = tokens.split(hidden, split.dim) if before is None else self._watched(hidden, before)
            return split_arguments(args, kwargs, split, tokens, own)

        # The hooks of other techniques are given this rank's tokens.
        block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)

    def _split_evaluations(self, evaluation: SplitEvaluation, part: Mapping[str, nn.Module], stays_split: bool) -> None:
        names = list(part)

        def is_in_training_chain(block: nn.Module) -> bool:
            return self._tokens[self._chain_of[block]] is not None

        for name, block in part.items():
            is_last = name == names[-1]
            evaluation.add_to(
                block, name, name == names[0], stays_split or not is_last, partial(self._inside, block),
                partial(is_in_training_chain, block),
            )  # fmt: skip

    def _refuse_within_chain(self, name: str, block: nn.Module, args: Any) -> None:
        """Raise if a block that is not split runs between blocks that are."""
        if not self.is_disabled and any(tokens is not None for tokens in self._tokens):
            raise SequenceSplitError(
                f"cp_size={self._group.size()}: the step runs {name} between blocks that have only some of the tokens,"
                " which the first step did not. Let every step run all blocks, or leave these blocks out by"
                " units=[...]."
            )

    def _begin(self, block: nn.Module, length: int, values: Sequence[Any]) -> Tokens | None:
        """Return this rank's tokens of a sequence; None: it is too short to be split, and all ranks compute all of it.

        Args:
            block: The first block of a chain.
            length: Number of tokens of the sequence.
            values: The arguments of the block.
        """
        for value in values:
            if is_cache(value) and value.get_seq_length() > 0:
                raise SequenceSplitError(
                    f"cp_size={self._group.size()}: a block is given cached keys and values ({type(value).__name__}) in"
                    " training. Pass use_cache=False, and no past keys."
                )
        tokens = Tokens(length, self._group, is_balanced=self._plan.attention == "all_gather")
        return None if tokens.are_too_few else tokens

    def _remember(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        """Remember what a block returns, before other hooks see it, for :meth:`_watched`."""
        self._returned[name] = output if isinstance(output, Tensor) else output[0]

    def _watched(self, hidden: Tensor, before: str) -> Tensor:
        """Return the hidden states, and raise in the backward if they have been used elsewhere than in this block.

        If they are used only once, their gradient is the tensor that the backward of the block has computed, and not a
        sum in other memory.

        Args:
            hidden: The hidden states that a block is given.
            before: The name of the block that has returned them.
        """
        returned = self._returned.pop(before, hidden)
        if not hidden.requires_grad or not returned.requires_grad:
            return hidden
        computed: list[Tensor] = []
        own = hidden.view_as(hidden)
        own.register_hook(computed.append)  # type: ignore[no-untyped-call]

        def check(gradient: Tensor) -> None:
            is_only_use = bool(computed) and gradient.data_ptr() == computed[-1].data_ptr()
            computed.clear()
            if not is_only_use:
                raise SequenceSplitError(
                    f"cp_size={self._group.size()}: the step uses the hidden states that {before} returns in another"
                    " place than the next block, and each rank has only some of their tokens. Use cp_size=1, or leave"
                    " these blocks out by units=[...]."
                )

        returned.register_hook(check)  # type: ignore[no-untyped-call]
        return own

    def _gather_hook(self, index: int, dim: int, stays_split: bool) -> Callable[[nn.Module, Any, Any], Any]:
        def whole(tokens: Tokens, output: Tensor) -> Tensor:
            return SplitTokens(output, tokens, dim) if stays_split else tokens.gather(output, dim)

        def gather(module: nn.Module, args: Any, output: Any) -> Any:
            tokens = self._tokens[index]
            if self.is_disabled or tokens is None:
                return None
            if self._random is not None:
                self._random.leave()
            self._tokens[index] = None
            if isinstance(output, Tensor):
                return whole(tokens, output)
            first, *others = output
            return whole(tokens, first), *others

        return gather

    def around_forward(self, block: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
        """Return a function that makes a context for a forward of ``block``, and for reruns of it in the backward.

        It is called when the forward begins, after the hooks that split the arguments.
        """
        index = self._chain_of.get(block)
        tokens = None if index is None or self.is_disabled else self._tokens[index]
        return nullcontext if tokens is None else partial(self._inside, block, tokens)

    @contextmanager
    def _inside(self, block: nn.Module, tokens: Tokens) -> Iterator[None]:
        """Replace functions in this context, unless they are replaced already: contexts are nested in a checkpoint."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        name = self._names[block]
        inside = self.inside = InsideBlock(tokens, self._plan.attention, self._plan.blocks[name])
        try:
            with inside:
                yield
        finally:
            self._is_inside = False
        inside.check(name)

    def check_ended(self) -> None:
        """Check that every chain of blocks whose hidden states were split has run to its last block.

        Raises:
            SequenceSplitError: If a step has left a chain before its end.
        """
        for (first, last), tokens in zip(self._chains, self._tokens, strict=True):
            if tokens is not None:
                self.forget()
                raise SequenceSplitError(
                    f"cp_size={self._group.size()}: the step has split hidden states along the sequence at {first}, and"
                    f" has not run {last}, where they are gathered: it takes another path than the first step did."
                )

    def forget(self) -> None:
        """Reset the state that a failed step has left behind."""
        self._tokens[:] = [None] * len(self._tokens)
        self._returned.clear()
        if self._random is not None:
            self._random.forget()


def named_inside(name: str, block: nn.Module) -> dict[str, nn.Module]:
    """Return ``block`` and the modules in it by their full names, given the full name of ``block``."""
    return {f"{name}.{inner}".rstrip("."): module for inner, module in block.named_modules()}


def _local_parts(chain: Sequence[str], blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the parts of ``chain`` whose blocks this rank has; stages pass each other whole hidden states."""
    parts: list[list[str]] = [[]]
    for name in chain:
        if name in blocks:
            parts[-1].append(name)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]
