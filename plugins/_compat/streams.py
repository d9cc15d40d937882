"""Let ranks agree on the batches that Lightning's loops fetch, and on what an evaluation has logged.

The module was tested with Lightning 2.6. Hooks of the loops for the number of batches, and data fetchers that a
strategy can choose, could replace this module.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import (
    _DataFetcherWrapper,
    _DataLoaderIterDataFetcher,
    _PrefetchDataFetcher,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_dist.plugins._compat.loops import loop_of_evaluation

__all__ = [
    "agree_on_evaluation_batches",
    "agree_on_training_batches",
    "complete_results",
    "described_results",
    "has_length",
    "is_surely_sized",
]


def has_length(loader: Any) -> bool:
    """Return whether ``loader`` has a length."""
    return sized_len(loader) is not None


def is_surely_sized(loader: Any) -> bool:
    """Return whether ``loader`` surely gives as many batches as its length says, as its dataset has an index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and has_length(loader)


def agree_on_training_batches(
    trainer: Trainer,
    limit: Callable[[list[Any], list[float]], list[float]],
    begin: Callable[[list[Any]], Callable[[int, bool], Callable[[], bool]] | None],
) -> None:
    """Let all ranks of a fit fetch equally many batches of each epoch.

    Args:
        trainer: The Trainer of the fit, whose training loaders have not been made yet.
        limit: Function that is given the training loaders and this rank's numbers of batches, and returns the numbers
            that all ranks fetch. All ranks call it together.
        begin: Function that is given the training loaders, and returns a function by which ranks agree on each batch
            before they run it; None: the numbers of batches suffice. The returned function is given the index of a
            batch and whether this rank has it. It begins an exchange, and returns a function that finishes it, which
            returns whether all ranks have the batch.
    """
    loop: Any = trainer.fit_loop

    def load_states() -> None:  # Lightning calls this between setting the limits and creating the first iterators.
        combined = loop._combined_loader
        combined.limits = limit(combined.flattened, combined.limits)
        type(loop)._load_combined_loader_states(loop)

    def setup_data() -> None:
        before = loop._data_fetcher
        with _zero_length_allowed(trainer):
            type(loop).setup_data(loop)
        fetcher = loop._data_fetcher
        kinds: dict[type, Any] = {
            _PrefetchDataFetcher: _AgreeingFetcher,
            _DataLoaderIterDataFetcher: _AgreeingIteratorFetcher,
        }
        if fetcher is before or type(fetcher) not in kinds:
            return
        exchange = begin(loop._combined_loader.flattened)
        if exchange is not None:
            loop._data_fetcher = kinds[type(fetcher)](exchange, fetcher)

    vars(loop).update(_load_combined_loader_states=load_states, setup_data=setup_data)


def agree_on_evaluation_batches(trainer: Trainer, agree: Callable[[list[float]], list[bool]]) -> None:
    """Let a rank without any batch run an evaluation of ``trainer`` as the other ranks do.

    Args:
        trainer: A Trainer that is about to run, and that has not made the loaders of its evaluation yet.
        agree: Function that is given this rank's number of batches of each loader, infinity for loaders of unknown
            length, and returns for each whether another rank has a batch. All ranks call it together.
    """
    loops: list[Any] = [
        trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    ]  # fmt: skip
    for loop in loops:
        name = "max_batches" if loop is trainer.predict_loop else "_max_batches"

        def setup_data(loop: Any = loop, name: str = name) -> None:
            before = getattr(loop, name)
            with _zero_length_allowed(trainer):
                type(loop).setup_data(loop)
            numbers = getattr(loop, name)
            if numbers is before or not numbers:
                return
            others_have = agree([float(number) for number in numbers])
            for index, number in enumerate(numbers):
                if number == 0 and others_have[index]:
                    numbers[index] = math.inf  # Otherwise the loop would leave out the evaluation's hooks.

        vars(loop)["setup_data"] = setup_data


@contextmanager
def _zero_length_allowed(trainer: Trainer) -> Iterator[None]:
    """Keep Lightning from raising an error on this rank alone if its loader has no batch, in this context."""
    module = trainer.lightning_module
    before = module.allow_zero_length_dataloader_with_multiple_devices
    module.allow_zero_length_dataloader_with_multiple_devices = True
    try:
        yield
    finally:
        module.allow_zero_length_dataloader_with_multiple_devices = before


class _AgreeingFetcher(_PrefetchDataFetcher):
    """Fetch batches ahead, and end the epoch at the first batch that a rank does not have.

    Whether all ranks have a batch is exchanged when it is fetched, and is looked at one step later. If the number of
    batches is unknown, a batch must be marked as the last one when it is returned. Two batches are fetched ahead then.

    The states of stateful loaders are those before the next batch that is returned, and not before the next that is
    fetched.

    Args:
        begin: Function that begins an exchange (see :func:`agree_on_training_batches`).
        other: Lightning's fetcher, whose iterator and fetched batches are taken over.
    """

    def __init__(self, begin: Callable[[int, bool], Callable[[], bool]], other: _PrefetchDataFetcher) -> None:
        super().__init__()
        self._begin = begin
        self._forget()
        self.setup(other.combined_loader)
        loader: Any = other.combined_loader
        vars(loader)["_state_dicts"] = self._states_of_next
        self.iterator, self.length, self.fetched = other.iterator, other.length, other.fetched
        self._queue.extend((batch, None) for batch in other.batches)
        self._is_exhausted = other.done and not other.batches
        num_known = len(other.batches) + (self._is_exhausted and self.length is None)
        self._exchanges.extend(begin(index, index < len(other.batches)) for index in range(num_known))
        self._fetch_ahead()

    def _forget(self) -> None:
        self._queue: deque[tuple[Any, list[Any] | None]] = deque()
        self._exchanges: deque[Callable[[], bool]] = deque()
        self._is_exhausted = False
        self._num_returned = self._num_judged = 0
        self._end: int | None = None
        """Index of the first batch of the epoch that some rank does not have; None: it is not known yet."""

    @override
    def reset(self) -> None:
        self._forget()
        super().reset()

    @override
    def __iter__(self) -> _AgreeingFetcher:
        super(_PrefetchDataFetcher, self).__iter__()  # Lightning's own fetches ahead by itself.
        self._fetch_ahead()
        return self

    @override
    def __next__(self) -> Any:
        if self.done:
            raise StopIteration
        self._judge(self._num_returned + (self.length is None))
        if self._end == self._num_returned or (not self._queue and self._end is None):
            self.done = True
            raise StopIteration
        batch, _ = self._queue.popleft()
        self._num_returned += 1
        self._fetch_ahead()
        if self.length is None:
            self.done = self._end == self._num_returned
        else:  # As with Lightning's fetcher, a loader that has fewer batches than its length ends without a last one.
            self.done = self.fetched - len(self._queue) >= self.length
        return batch

    def _fetch_ahead(self) -> None:
        num_ahead = 2 if self.length is None else 1
        while self._num_judged + len(self._exchanges) < self._num_returned + num_ahead and self._end is None:
            if self.length is not None and self.fetched >= self.length:
                return
            states = copy.deepcopy(type(self.combined_loader)._state_dicts(self.combined_loader))
            if not self._is_exhausted:
                try:
                    self._queue.append((super(_PrefetchDataFetcher, self).__next__(), states))
                except StopIteration:
                    self._is_exhausted = True
                self.done = False
            index = self._num_judged + len(self._exchanges)
            self._exchanges.append(self._begin(index, not self._is_exhausted))

    def _judge(self, index: int) -> None:
        """Find out whether all ranks have the batches up to ``index``, as far as they were fetched."""
        while self._num_judged <= index and self._exchanges and self._end is None:
            if not self._exchanges.popleft()():
                self._end = self._num_judged
            self._num_judged += 1
        while self._end is not None and self._exchanges:
            self._exchanges.popleft()()

    def _states_of_next(self) -> list[Any]:
        states = self._queue[0][1] if self._queue else None
        return type(self.combined_loader)._state_dicts(self.combined_loader) if states is None else states


class _AgreeingIteratorFetcher(_DataLoaderIterDataFetcher):
    """Give ``training_step`` an iterator, which ends on all ranks at the first batch that a rank does not have.

    Ranks exchange whether they have a batch when the step asks for it, which it must do equally often on all ranks.

    Args:
        begin: Function that begins an exchange (see :func:`agree_on_training_batches`).
        other: Lightning's fetcher, whose iterator is taken over.
    """

    def __init__(self, begin: Callable[[int, bool], Callable[[], bool]], other: _DataLoaderIterDataFetcher) -> None:
        super().__init__()
        self._begin = begin
        self.setup(other.combined_loader)
        self.iterator, self.length, self.done = other.iterator, other.length, other.done
        self.iterator_wrapper: Any = _AgreeingIterator(self, begin)

    @override
    def __iter__(self) -> _AgreeingIteratorFetcher:
        super().__iter__()
        self.iterator_wrapper = _AgreeingIterator(self, self._begin)
        return self


class _AgreeingIterator(_DataFetcherWrapper):
    def __init__(self, fetcher: _DataLoaderIterDataFetcher, begin: Callable[[int, bool], Callable[[], bool]]) -> None:
        super().__init__(fetcher)
        self._begin = begin
        self._num_returned = 0

    @override
    def __next__(self) -> Any:
        if self.data_fetcher.done:
            raise StopIteration
        try:
            batch = [super().__next__()]
        except StopIteration:
            batch = []
        if not self._begin(self._num_returned, bool(batch))():
            self.data_fetcher.done = True
            raise StopIteration
        self._num_returned += 1
        return batch[0]


def described_results(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Return a description of each value that is reduced at the end of this evaluation, in their order.

    Args:
        trainer: A Trainer in an evaluation, not in a prediction.
    """
    results: Any = loop_of_evaluation(trainer)._results
    return [
        (key, results.dataloader_idx, _described(metric))
        for key, metric in results.valid_items()
        if metric.meta.on_epoch and metric.meta.sync.group is None
    ]


def _described(metric: Any) -> dict[str, Any]:
    meta, sync = metric.meta, metric.meta.sync
    names = (
        "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
        "dataloader_idx", "metric_attribute",
    )  # fmt: skip
    states = ("value", "cumulated_batch_size") if metric.is_tensor else ()
    return {
        "meta": {name: getattr(meta, name) for name in names} | {"reduce_fx": meta.reduce_fx.__name__},
        "sync": (sync.should, sync.rank_zero_only, sync.op),
        "is_tensor": metric.is_tensor,
        "dtypes": {name: getattr(metric, name).dtype for name in states if hasattr(metric, name)},
    }


def complete_results(trainer: Trainer, described: Sequence[tuple[Any, ...]]) -> None:
    """Let this rank reduce the values that are described, with no samples of its own where it has logged none.

    Args:
        trainer: A Trainer in an evaluation, not in a prediction.
        described: The descriptions of all ranks' values by :func:`described_results`, each once, in the order in which
            all ranks reduce them.
    """
    results: Any = loop_of_evaluation(trainer)._results
    ordered: dict[str, Any] = {}
    for key, _, description in described:
        metric = results.pop(key, None)
        if metric is None:
            meta = _Metadata(**description["meta"])
            should, rank_zero_only, op = description["sync"]
            reduce = trainer.strategy.reduce
            meta.sync = _Sync(fn=reduce, _should=should, rank_zero_only=rank_zero_only, _op=op)
            metric = _ResultMetric(meta, description["is_tensor"])
            for name, dtype in description["dtypes"].items():
                setattr(metric, name, getattr(metric, name).to(dtype))
            if not metric.is_tensor:
                metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute or "")
            metric.to(trainer.strategy.root_device)
        elif metric.has_reset:
            for name, dtype in description["dtypes"].items():
                setattr(metric, name, getattr(metric, name).to(dtype))
        metric.has_reset = False
        ordered[key] = metric
    others = dict(results)
    results.clear()
    results.update(ordered | others)
