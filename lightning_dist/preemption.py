"""Stopping when asked to: a signal to any process of a run, which all of them agree to have heard."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["EXIT_STOPPED", "StopRequest", "TrainingStopped"]

EXIT_STOPPED = 75
"""The exit code of a run that was asked to stop and has saved; sysexits.h calls it a temporary failure: try again."""


class TrainingStopped(SystemExit):
    """Ends a process with :data:`EXIT_STOPPED`.

    Args:
        path: The checkpoint that was saved.
    """

    def __init__(self, path: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.path = path


class StopRequest:
    """Hears signals that ask to stop. They change nothing but a flag, which the ranks compare between steps.

    Args:
        signals: Which.
    """

    def __init__(self, signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._heard = 0
        self._heard_at = 0.0
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def listen(self) -> None:
        """Handle the signals from now on; outside of the main thread, where Python cannot, do nothing."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {number: signal.signal(number, self._hear) for number in self._signals}

    def close(self) -> None:
        """Leave the signals to those who had them before. All ranks have called :meth:`agreed` equally often."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        self._pending = self._group = None

    @property
    def seconds_since(self) -> float:
        """Since this rank heard of it; 0 if it has not, itself."""
        return time.monotonic() - self._heard_at if self._heard else 0.0

    def agreed(self) -> int:
        """The signal that some rank had heard when all of them called this before; 0: none.

        The answer to a call is that of the call before, so that no rank waits for another here: what they exchange is
        under way while they compute.

        Raises:
            RuntimeError: If another rank has gone.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._heard
        if self._group is None:
            # Its own: on whatever device training is, its collectives are not to be waited for.
            self._group = dist.new_group(backend="gloo", group_desc="background: stop requests")
        heard = 0
        if self._pending is not None:
            work, answer = self._pending
            work.wait()
            heard = int(answer)
        mine = torch.tensor(self._heard)
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (work, mine)
        return heard

    def _hear(self, number: int, frame: Any) -> None:
        if not self._heard:
            self._heard, self._heard_at = number, time.monotonic()
