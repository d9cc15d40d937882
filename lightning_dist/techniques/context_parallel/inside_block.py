"""Run a block on this rank's tokens: replace the functions whose results depend on which tokens they are.

Attention is replaced (see :mod:`.attention`). Code inside of a block may also number the tokens, from the length of its
input: ``torch.arange(x.size(1))``, or ``self.cos[:x.size(1)]`` of a table with a row for each position. It gets the
numbers, or the rows, of this rank's tokens. A new tensor for pairs of tokens, such as ``torch.ones(x.size(1),
x.size(1))`` for a mask, is for all tokens. How often a block does so, and how often it computes attention, is found by
a trial. If a step does so another number of times, for example because some other size is by chance that of this rank's
tokens, an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_dist.techniques.context_parallel.attention import SplitAttention
from lightning_dist.techniques.context_parallel.plan import SequenceSplitError, SplitBlock
from lightning_dist.techniques.context_parallel.tokens import Tokens

__all__ = ["InsideBlock"]

_attend = functional.scaled_dot_product_attention

_FILLED = {torch.ones, torch.zeros, torch.full, torch.empty}


class InsideBlock(TorchFunctionMode):
    """Replace functions while a block runs on this rank's tokens.

    Args:
        tokens: The tokens that this rank has.
        attention: ``"ulysses"`` or ``"all_gather"``.
        expected: What the trial of the block has found.
    """

    def __init__(self, tokens: Tokens, attention: str, expected: SplitBlock) -> None:
        super().__init__()
        self._tokens = tokens
        self._expected = expected
        self.attend = SplitAttention(tokens, attention, expected.kinds)
        self.num_positions = 0
        """How often code has numbered the tokens, or has taken a row of a table for each of them."""

    # The exchanges break the graph of a compiled block, and torch cannot trace into a mode.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            return self._rows(*args)
        if func is _attend:
            return self.attend(*args, **kwargs)
        if func is torch.arange:
            return self._numbers(args, kwargs)
        if func in _FILLED:
            return func(*self._for_all_pairs(args), **kwargs)
        if func is functional.multi_head_attention_forward:
            with self._within_functional():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def check(self, name: str) -> None:
        """Check that the block ``name`` has done what the trial has found.

        Raises:
            SequenceSplitError: If it has not.
        """
        tokens = self._tokens
        numbers = {
            "asks for the positions of its tokens": (self.num_positions, self._expected.num_positions),
            "computes attention": (
                len(self.attend.kinds),
                None if self._expected.kinds is None else len(self._expected.kinds),
            ),
        }
        for what, (number, expected) in numbers.items():
            if expected not in (None, number):
                raise SequenceSplitError(
                    f"cp_size={tokens.group.size()}: {name} {what} {number} times in this step, and {expected} times in"
                    f" the first one. Another size may be {tokens.own} by chance, which is the number of tokens on a"
                    f" rank: pad the sequence to another length than {tokens.length}."
                )

    @contextmanager
    def _within_functional(self) -> Iterator[None]:
        """Let a function of ``torch.nn.functional`` call the replaced attention; a mode sees only the outer call."""
        with mock.patch.object(functional, "scaled_dot_product_attention", self.attend):
            yield

    def _numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return ``torch.arange`` of the arguments, or the positions of this rank's tokens if they ask for them."""
        given = dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False)) | kwargs
        start, step = given.pop("start", 0), given.pop("step", 1)
        if given.get("end") != self._tokens.own or start != 0 or step != 1:
            return torch.arange(*args, **kwargs)
        self.num_positions += 1
        return self._tokens.part(torch.arange(**{**given, "end": self._tokens.length}), -1)

    def _for_all_pairs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a function that fills a tensor, for all tokens if two dimensions are this rank's."""
        own, length = self._tokens.own, self._tokens.length
        is_listed = bool(args) and isinstance(args[0], list | tuple)
        sizes = list(args[0] if is_listed else args)
        if sizes[-2:] != [own, own] or own == length:
            return args
        self.num_positions += 1
        sizes[-2:] = [length, length]
        return (tuple(sizes), *args[1:]) if is_listed else tuple(sizes)

    def _rows(self, tensor: Tensor, index: Any) -> Tensor:
        """Return ``tensor[index]``, or the rows of this rank's tokens if it takes one from a table for each token."""
        tokens = self._tokens
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, slice) and part.stop == tokens.own for part in parts):
            return tensor[index]
        is_table = tensor.is_leaf or not tensor.requires_grad  # Others are computed from hidden states.
        if not is_table or any(isinstance(part, Tensor | list | bool) for part in parts):
            return tensor[index]
        num_taken = sum(part is not None and part is not Ellipsis for part in parts)
        whole, found, dim, result_dim = [], [], 0, 0
        for part in parts:
            takes = isinstance(part, slice) and part.stop == tokens.own and not part.start and part.step in (None, 1)
            if takes and dim < tensor.ndim and tensor.size(dim) >= tokens.length:
                whole.append(slice(None, tokens.length))
                found.append(result_dim)
            else:
                whole.append(part)
            skipped = tensor.ndim - num_taken if part is Ellipsis else 0 if part is None else 1
            dim += skipped
            result_dim += skipped if part is Ellipsis else 0 if isinstance(part, int) else 1
        if not found:
            return tensor[index]
        self.num_positions += 1
        rows = tensor[tuple(whole)]
        # A table of pairs of tokens, such as a mask, is used whole.
        return tokens.part(rows, found[0] - rows.ndim) if len(found) == 1 else rows
