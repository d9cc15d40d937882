"""Send and receive tensors under the rules of NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.nccl_rules.group import OrderedGroup, described
from tests.nccl_rules.memory import bytes_of, raw
from tests.nccl_rules.operations import Operation, timeout_s
from tests.nccl_rules.rules import RuleError, check_tensors

__all__ = ["GroupWithMessages"]

_HEADER = 64
"""Number of bytes before each message, in which sender and receiver compare its size and dtype."""


class _Message(NamedTuple):
    """Describe a message: a tensor that is sent to the rank ``peer`` of the group, or received from it."""

    is_sent: bool
    tensor: Tensor
    peer: int
    content: Tensor
    """A copy of the bytes that are sent, or room for those that are received."""

    @property
    def what(self) -> str:
        """Return direction, peer, size and dtype."""
        return f"{'to' if self.is_sent else 'from'} {self.peer} {described([self.tensor])}"

    def header(self) -> Tensor:
        """Return the bytes that describe size and dtype."""
        text = described([self.tensor]).encode().ljust(_HEADER, b"\0")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class GroupWithMessages(OrderedGroup):
    """Run sends and receives in the order of the collectives; a send ends when it is received, and tags are ignored."""

    _batch: list[_Message] | None = None

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Operation | None:
        """Begin a send, or add it to the batch."""
        return self._add(True, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Operation | None:
        """Begin a receive, or add it to the batch."""
        return self._add(False, tensors[0], peer)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Refuse to receive from any rank, as NCCL does.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("Backend nccl does not support recvAnysource")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a monitored barrier, as NCCL does.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("Backend nccl does not support monitoredBarrier, only GLOO supports monitored barrier.")

    def start_batch(self) -> None:
        """Collect the sends and receives that follow."""
        self._batch = []

    def end_batch(self) -> Operation:
        """Begin the collected sends and receives at once."""
        messages, self._batch = self._batch, None
        assert messages
        return self._begin_messages(messages)

    def _add(self, is_sent: bool, tensor: Tensor, peer: int) -> Operation | None:
        check_tensors([tensor])
        if peer == self._own:
            raise ValueError("Invalid destination rank: should not be the same as the rank of the current process")
        with raw():
            content = bytes_of(tensor).clone()
        message = _Message(is_sent, tensor, peer, content)
        if self._batch is not None:
            self._batch.append(message)
            return None
        return self._begin_messages([message])

    def _begin_messages(self, messages: Sequence[_Message]) -> Operation:
        return self.begin(
            f"messages {' '.join(message.what for message in messages)}",
            [message.tensor for message in messages if message.is_sent],
            [message.tensor for message in messages if not message.is_sent],
            lambda: self._run_messages(messages),
            is_compared=False,
        )

    def _run_messages(self, messages: Sequence[_Message]) -> list[Tensor]:
        """Run all messages at once on the group's thread, and return the bytes that were received."""
        limit = timedelta(seconds=timeout_s())
        sends, headers = [], []
        for message in messages:
            header = message.header()
            if message.is_sent:
                begun = [
                    self._gloo.send([sent], message.peer, tag) for tag, sent in ((1, header), (2, message.content))
                ]
                sends.append((begun, header))
            else:
                received = torch.empty_like(header)
                headers.append((message, header, received, self._gloo.recv([received], message.peer, 1)))
        for message, header, received, work in headers:  # Data of another size must not be received.
            work.wait(limit)
            if not torch.equal(received, header):
                sizes = [bytes(text.numpy()).rstrip(b"\0").decode() for text in (header, received)]
                raise RuleError(
                    f"rank {self.global_ranks[self._own]} receives {sizes[0]} from rank"
                    f" {self.global_ranks[message.peer]}, which sends {sizes[1]}"
                )
        for work in [self._gloo.recv([message.content], message.peer, 2) for message, *_ in headers]:
            work.wait(limit)
        for begun, _ in sends:
            for work in begun:
                work.wait(limit)
        return [message.content for message, *_ in headers]
