"""Exchange lines of JSON between two processes."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

__all__ = ["JsonSocket"]


class JsonSocket:
    """Send and receive messages, each of which is a line of JSON.

    Args:
        connection: One end of a pair of sockets.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the other process has ended, which :meth:`messages` notices."""
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self, has_ended: Callable[[], bool], check_every_s: float) -> Iterator[dict[str, Any]]:
        """Yield messages until the other process has closed its end or has ended.

        Args:
            has_ended: Function that returns whether the other process has ended, although its end of the connection is
                open, because a process that it has forked has it too.
            check_every_s: Time in seconds after which ``has_ended`` is called while no message comes.
        """
        data = b""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if not poll.poll(1000 * check_every_s):
                if has_ended():
                    return
                continue
            try:
                received = self._socket.recv(2**16)
            except OSError:
                return
            if not received:
                return
            *lines, data = (data + received).split(b"\n")
            yield from map(json.loads, lines)

    def end(self) -> None:
        """Let the other process know that no message follows."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
