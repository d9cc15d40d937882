"""Calls to a store, one after another, on a thread of their own."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


class BackgroundWriter:
    """Runs calls in order, without the caller waiting for them.

    Training then does not wait for a slow store. And Ctrl-C, which Python raises in the main thread, cannot stop a call
    in the middle of a transaction: that would leave an SQLite database locked for whoever comes next.

    Args:
        max_pending: From this many calls on that wait to be made, a new one waits too.
    """

    def __init__(self, max_pending: int = 100) -> None:
        self._max_pending = max_pending
        self._pending: deque[Future[Any]] = deque()
        # Started on first use: until then a writer, and the logger that has it, can be pickled.
        self._thread: ThreadPoolExecutor | None = None

    def put(self, call: Callable[[], Any]) -> None:
        """Have a call made soon.

        Raises:
            Exception: What an earlier call raised, once. The new call is made nonetheless.
        """
        self._pending.append(self._submit(call))
        while len(self._pending) > self._max_pending or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

    def run(self, call: Callable[[], _T]) -> _T:
        """Make a call after all earlier ones, wait for it, and return or raise what it returns or raises."""
        return self._submit(call).result()

    def flush(self) -> None:
        """Wait until every call has been made.

        Raises:
            Exception: What the first call to fail raised.
        """
        failed: Exception | None = None
        while self._pending:
            error = self._pending.popleft().exception()
            if failed is None and isinstance(error, Exception):
                failed = error
        if failed is not None:
            raise failed

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logger")
        return self._thread.submit(call)
