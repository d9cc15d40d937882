"""Give a simulated rank what the other ranks would send it: what it sends itself.

Ranks agree on numbers, flags and plans by messages. In a simulation all of them take the same decisions, so that a rank
receives what it has sent. Messages of tensors without values need no content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Echo"]


class Echo:
    """Fill in what is received by collectives and messages between two ranks."""

    def __init__(self) -> None:
        self._sent: dict[int, Tensor] = {}
        """The message that was sent last under each tag."""
        self._rules: Mapping[str, Callable[[Sequence[Any]], None]] = {
            "allgather": _all_gather,
            "allgather_base": _all_gather_base,
            "reduce_scatter_base": _reduce_scatter_base,
            "alltoall_base": _all_to_all_base,
            "send": self._send,
            "recv": self._receive,
        }

    @torch.no_grad()
    def __call__(self, name: str, args: Sequence[Any]) -> None:
        """Write what the ranks receive by an operation into its outputs.

        All-reduces and broadcasts leave a tensor as it is: a bitwise or, a maximum and a mean of equal values are these
        values, and sums of numbers of ranks are never read by the host.

        Args:
            name: Name of the operation in torch's namespace ``c10d``.
            args: Arguments of the operation, in the order of its schema.
        """
        rule = self._rules.get(name.strip("_"))
        if rule is not None:
            rule(args)

    def _send(self, args: Sequence[Any]) -> None:
        (tensor,), tag = args[0], args[3]
        self._sent[tag] = tensor.clone()

    def _receive(self, args: Sequence[Any]) -> None:
        (tensor,), tag = args[0], args[3]
        sent = self._sent.get(tag)
        if sent is not None and sent.numel() == tensor.numel():
            tensor.copy_(sent.view_as(tensor))
        else:  # A later stage of a pipeline receives a vote before it sends one: the others agree.
            tensor.fill_(1)


def _all_gather(args: Sequence[Any]) -> None:
    for outputs, own in zip(args[0], args[1], strict=True):
        for output in outputs:
            output.copy_(own)


def _all_gather_base(args: Sequence[Any]) -> None:
    output, own = args[0].view(-1), args[1].reshape(-1)
    output.copy_(own.repeat(output.numel() // own.numel()) if own.numel() else own)


def _reduce_scatter_base(args: Sequence[Any]) -> None:
    output = args[0].view(-1)
    output.copy_(args[1].reshape(-1)[: output.numel()])


def _all_to_all_base(args: Sequence[Any]) -> None:
    output, own = args[0].view(-1), args[1].reshape(-1)
    if output.numel() == own.numel():
        output.copy_(own)
    else:
        output.zero_()
