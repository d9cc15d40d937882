"""Stop a run on all ranks at the same step after a signal to any of its processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist._compat import created_with

__all__ = ["EXIT_STOPPED", "StopRequest", "TrainingStopped"]

EXIT_STOPPED = 75
"""Exit code of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, which asks to try again."""


class TrainingStopped(SystemExit):
    """End the process with exit code :data:`EXIT_STOPPED`.

    Args:
        path: Path of the checkpoint that was saved.
    """

    def __init__(self, path: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.path = path


class StopRequest:
    """Handle signals that ask to stop: a signal only sets a flag, and the ranks exchange their flags between steps.

    Args:
        signals: Numbers of the signals that ask to stop.
        timeout: The time for which a rank waits for the others' flags, longer than a step or a save between two steps;
            None: torch's default.
    """

    def __init__(
        self, signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1), timeout: timedelta | None = None
    ) -> None:
        self._signals = signals
        self._timeout = timeout
        self._before: dict[int, Any] = {}
        self._signal_number = 0
        self._signal_time = 0.0
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def listen(self) -> None:
        """Install the signal handlers; do nothing outside of the main thread, in which Python cannot install them."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}

    def close(self) -> None:
        """Restore the previous signal handlers. All ranks must have called :meth:`agreed` equally often."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        self._pending = self._group = None

    @property
    def seconds_since(self) -> float:
        """Return the seconds since this rank received a signal; 0 if it has not received one itself."""
        return time.monotonic() - self._signal_time if self._signal_number else 0.0

    def agreed(self) -> int:
        """Return on all ranks the same signal, which some rank had received by the previous call; 0 if none had.

        This is a collective over all processes. Each call starts an all-reduce and returns the result of the previous
        one, so that the ranks exchange flags while they compute and do not wait for each other here.

        Raises:
            RuntimeError: If another rank has ended.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._signal_number
        if self._group is None:
            # A separate gloo group does not wait for the collectives of the training, on any device.
            self._group = dist.new_group(
                timeout=self._timeout, backend=created_with("gloo"), group_desc="background: stop requests"
            )
        heard = 0
        if self._pending is not None:
            work, answer = self._pending
            work.wait()
            heard = int(answer)
        mine = torch.tensor(self._signal_number)
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (work, mine)
        return heard

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self._signal_number:
            self._signal_number, self._signal_time = number, time.monotonic()
