"""``watchdog_process SOCKET FOLDER TIMEOUT_S NUM_RANKS``: watch until all ranks have ended."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from .node import Node


def main() -> None:
    """Watch, as told by the command line: socket's descriptor, folder, timeout in seconds, number of ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, folder, timeout_s, num_ranks = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    Node(listener, Path(folder), float(timeout_s), int(num_ranks)).watch()


if __name__ == "__main__":
    main()
