"""Run the operations of a group one after another, and hide what they change until the caller waits for them."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.memory import bytes_of, device, poison, raw
from tests.nccl_rules.rules import RuleError

__all__ = ["TIMEOUT_VARIABLE", "Item", "Operation", "run_items", "timeout_s"]

TIMEOUT_VARIABLE = "LIGHTNING_DIST_TESTS_NCCL_TIMEOUT"
"""Environment variable with the time in seconds after which a wait fails."""


def timeout_s() -> float:
    """Return the time in seconds after which a wait fails."""
    return float(os.environ.get(TIMEOUT_VARIABLE, "60"))


class Item:
    """Hold a function that a group's thread runs, and its result: the bytes of each output."""

    def __init__(self, what: str, run: Callable[[], list[Tensor]]) -> None:
        self.what = what
        self.run: Callable[[], list[Tensor]] | None = run
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.result: list[Tensor] = []


def run_items(items: queue.SimpleQueue[Item | None]) -> None:
    """Run the items of a group in order; after one that failed, all later ones fail."""
    broken: BaseException | None = None
    while (item := items.get()) is not None:
        try:
            if broken is not None:
                raise RuleError(f"{item.what}: an earlier operation of the group has failed: {broken}")
            assert item.run is not None
            with torch.no_grad():
                item.result = item.run()
        except BaseException as error:
            broken = broken or error
            item.error = error
        item.done.set()
        item.run = None
        del item


class Operation(dist.Work):
    """Represent an operation that has begun. Its outputs get their values when the caller waits for it.

    Args:
        group: Name of the group.
        item: What the group's thread runs.
        inputs: The tensors that are sent. Their values have already been copied; they must not change before the wait,
            unless they share their memory with an output.
        outputs: The tensors that are received.
        late: Function that is given the item and the seconds waited, and returns an error if it cannot end.
    """

    def __init__(
        self,
        group: str,
        item: Item,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        late: Callable[[Item, float], BaseException | None],
    ) -> None:
        super().__init__()
        self._item, self._late = item, late
        self._outputs = list(outputs)
        self._lock = threading.Lock()
        self._is_finished = False
        with raw():
            written = {output.untyped_storage().data_ptr() for output in outputs}
            kept = [i for i in inputs if i.numel() and i.untyped_storage().data_ptr() not in written]
            self._sent = [(tensor, bytes_of(tensor).clone()) for tensor in kept]
            self._token = device().begin(group, inputs, outputs)
            for output in outputs:
                if output.numel():
                    poison(output)
            self._hidden = [(o, bytes_of(o).clone(), o.untyped_storage().data_ptr()) for o in outputs]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation, and give the outputs their values.

        Raises:
            RuleError: If the operation broke a rule or did not end, or if tensors changed before the wait.
        """
        begin = time.monotonic()
        while not self._item.done.wait(min(1.0, timeout_s())):
            error = self._late(self._item, time.monotonic() - begin)
            if error is not None:
                raise error
        if isinstance(self._item.error, RuntimeError) and not isinstance(self._item.error, RuleError):
            raise self._late(self._item, math.inf) or self._item.error from self._item.error  # Gloo lost a connection.
        if self._item.error is not None:
            raise self._item.error
        with self._lock:
            if not self._is_finished:
                self._is_finished = True
                self._finish()
        device().wait(self._token)
        return True

    def _finish(self) -> None:
        what = self._item.what
        with raw():
            for tensor, before in self._sent:
                # CUDA's allocator keeps the memory of a tensor that was freed, so that such an input is no error.
                if tensor.untyped_storage().nbytes() and not torch.equal(bytes_of(tensor), before):
                    raise RuleError(f"{what}: an input was changed before the wait")
            for (tensor, hidden, pointer), result in zip(self._hidden, self._item.result, strict=True):
                if not tensor.numel():
                    continue
                if not tensor.untyped_storage().nbytes():
                    raise RuleError(f"{what}: the memory of an output was freed before the wait")
                is_same = tensor.untyped_storage().data_ptr() == pointer
                if is_same and not torch.equal(bytes_of(tensor), hidden):
                    raise RuleError(f"{what}: an output was changed before the wait")
                bytes_of(tensor).copy_(result)
        self._sent, self._hidden = [], []

    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not."""
        return self._item.done.is_set()

    def is_success(self) -> bool:
        """Return whether the operation has ended successfully."""
        return self._item.done.is_set() and self._item.error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, if there is one."""
        return self._item.error

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does; with NCCL, only the current stream would wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait as :meth:`wait` does; with NCCL, only the current stream would wait."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future with the outputs, for which this call waits."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs
