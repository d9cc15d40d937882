"""Run calls to a store one after another, on a background thread."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


class BackgroundWriter:
    """Run calls in order on a background thread, so that the caller does not wait for them.

    Training then does not wait for a slow store. Also, Ctrl-C, which Python raises in the main thread, cannot interrupt
    a call in the middle of a transaction, which would leave an SQLite database locked.

    Args:
        max_pending: Maximum number of pending calls; :meth:`put` waits if there are more.
        is_unreachable: Function that returns whether an error means that the store cannot be reached. After such an
            error, the calls that are still queued fail with it at once, because each of them might wait for minutes.
    """

    def __init__(
        self, max_pending: int = 100, is_unreachable: Callable[[Exception], bool] = lambda error: False
    ) -> None:
        self._max_pending = max_pending
        self._is_unreachable = is_unreachable
        self._unreachable: Exception | None = None
        self._pending: deque[Future[Any]] = deque()
        # The thread is started on first use, because a writer with a thread, and its logger, cannot be pickled.
        self._thread: ThreadPoolExecutor | None = None

    def put(self, call: Callable[[], Any]) -> None:
        """Queue a call.

        Raises:
            Exception: The error of an earlier call; each is raised once, and the new call is queued nonetheless.
        """
        self._pending.append(self._submit(call))
        while len(self._pending) > self._max_pending or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

    def run(self, call: Callable[[], _T]) -> _T:
        """Run a call after all earlier ones, wait for it, and return its result or raise its error."""
        return self._submit(call).result()

    def flush(self) -> None:
        """Wait until every queued call has run.

        Raises:
            Exception: The error of the first call that failed.
        """
        failed: Exception | None = None
        while self._pending:
            error = self._pending.popleft().exception()
            if failed is None and isinstance(error, Exception):
                failed = error
        if failed is not None:
            raise failed

    def try_again(self) -> None:
        """Call the store again for later calls, although it could not be reached."""
        self._unreachable = None

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logger")
        return self._thread.submit(self._call, call)

    def _call(self, call: Callable[[], _T]) -> _T:
        if self._unreachable is not None:
            raise self._unreachable
        try:
            return call()
        except Exception as error:
            if self._is_unreachable(error):
                self._unreachable = error
            raise
