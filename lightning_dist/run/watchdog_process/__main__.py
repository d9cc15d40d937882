"""Run ``watchdog_process SOCKET FOLDER TIMEOUT_S NUM_RANKS``, which watches until all ranks have ended."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from .node import Node


def main() -> None:
    """Watch as the arguments say: the socket's file descriptor, folder, timeout in seconds, and number of ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, folder, timeout_s, num_ranks = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    Node(listener, Path(folder), float(timeout_s), int(num_ranks)).watch()


if __name__ == "__main__":
    main()
