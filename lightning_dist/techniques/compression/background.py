"""Run functions one after another on a thread, or on a stream of the accelerator, beside the backward."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from lightning_dist.mesh.collective_waits import waiting
from lightning_dist.parameters.gradient_reducer import Reduction

__all__ = ["InBackground"]

_Task = tuple[Callable[[], None], "Future[None]"]


class InBackground:
    """Run functions beside the backward, in the order in which they were given.

    On the CPU they run on a thread, which ends with the process or when this object is no longer used. On an
    accelerator, their operations are put into a stream of their own.

    Args:
        device: Device of the tensors that the functions work on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._has_thread = False
        self._stream: torch.Stream | None = None

    def run(self, function: Callable[[], None]) -> Reduction:
        """Begin to run ``function`` after those that were given before, and return an object to wait for its end."""
        if self._device.type != "cpu":
            return self._run_on_stream(function)
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work, args=(self._tasks,), name="gradient compression", daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        future: Future[None] = Future()
        self._tasks.put((function, future))
        return _OnThread(future)

    def _run_on_stream(self, function: Callable[[], None]) -> Reduction:
        accelerator = torch.get_device_module(self._device.type)
        if self._stream is None:
            self._stream = accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream), torch.no_grad():
            function()
        return _OnStream(self._stream.record_event(), self._device.type, function)


class _OnThread:
    """Represent a function that runs on the thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the function has ended, and raise its error if there is one."""
        waiting(self._future.result)


class _OnStream:
    """Represent a function whose operations are in the stream.

    It keeps the function, and with it the tensors that the operations use, until the current stream waits for them. The
    memory of tensors that were freed before could be given to operations of the current stream at once.
    """

    def __init__(self, event: torch.Event, device_type: str, function: Callable[[], None]) -> None:
        self._event = event
        self._device_type = device_type
        self._function: Callable[[], None] | None = function

    def wait(self) -> None:
        """Let the current stream wait for the operations; the host does not wait."""
        torch.get_device_module(self._device_type).current_stream().wait_event(self._event)
        self._function = None


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        function, future = task
        try:
            with torch.no_grad():
                function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del task, function, future  # They hold gradients, which must not outlive their step.
