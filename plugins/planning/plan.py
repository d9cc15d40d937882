"""Predict the memory and the time of many layouts by dry runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.plugins.planning.choices import RECOMPUTING, variants
from lightning_dist.plugins.planning.dry_run import DryRun, prepare_data, run_as_rank
from lightning_dist.plugins.planning.estimates import Estimates, base_layouts, batches_are_divided
from lightning_dist.plugins.planning.forked import in_fork, in_forks
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.step_time import Where
from lightning_dist.run.doctor.devices import num_cores
from lightning_dist.run.simulation import Operation

__all__ = ["Make", "plan", "predict"]

Make = Callable[[Layout], tuple[LightningModule, Any, Mapping[str, Any]]]
"""Function that makes the module, its data, and the arguments of a Trainer, for a layout."""


def plan(
    make: Make,
    layouts: Sequence[Layout],
    memory: int | None,
    backend: str,
    where: Callable[[Collection[Operation]], Where] | None = None,
    given: Collection[str] = (),
    by_memory: bool = False,
    num_devices: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> list[Planned]:
    """Predict the memory and the time of ``layouts`` by dry runs, several at a time.

    Args:
        make: Function that makes what is trained; it is called in forked processes.
        layouts: The layouts among which to choose.
        memory: Bytes of the memory of a device; None: it has no limit.
        backend: Backend over which the ranks would communicate, ``"gloo"`` or ``"nccl"``.
        where: Function that returns the speed of the devices, given the operations of all layouts, which it may
            measure; None: times are not predicted.
        given: Names of arguments of the strategy that are set: no values are chosen for them.
        by_memory: Whether those that fit are sorted by their peaks.
        num_devices: Number of devices of a node, which the module and its data may ask the Trainer for; None: all ranks
            of a layout are on one node.
        on_progress: Function that is called with the number of dry runs that have ended and the number of all.

    Returns:
        The prediction of each layout: those that fit, the fastest first; those that do not, those that need the least
        first; and those that cannot be used. If no times are predicted, those that fit have the order of ``layouts``.
        If some that fit are estimated, the best one that is not is in front.
        Layouts that need too much are also predicted with recomputed activations, and the best one with the options of
        :func:`~lightning_dist.plugins.planning.choices.variants`.
    """
    order = partial(_in_order, memory=memory, by_memory=by_memory)
    dry_runs = _DryRuns(make, backend, num_devices, on_progress)
    planned = _of_sizes(dry_runs, layouts, memory, where, given, order)
    planned = _checked_first(planned, memory)
    best = planned[0]
    if best.peak is None:
        return planned
    found = dry_runs.planned(variants(best, best.fits(memory), given), where)
    return _checked_first(order([*planned, *(one for one in found if one.peak is not None)]), memory)


def predict(
    make: Make,
    layout: Layout,
    backend: str,
    where: Callable[[Collection[Operation]], Where] | None = None,
    num_devices: int | None = None,
) -> Planned:
    """Predict the memory and the time of one layout by dry runs.

    Args:
        make: As for :func:`plan`, like the others.
        layout: The layout whose needs are predicted.
        backend: Backend over which the ranks would communicate.
        where: Function that returns the speed of the devices; None: the time is not predicted.
        num_devices: Number of devices of a node.
    """
    (planned,) = _DryRuns(make, backend, num_devices, lambda done, all_: None).planned([layout], where)
    return planned


def _of_sizes(
    dry_runs: _DryRuns,
    layouts: Sequence[Layout],
    memory: int | None,
    where: Callable[[Collection[Operation]], Where] | None,
    given: Collection[str],
    order: Callable[[list[Planned]], list[Planned]],
) -> list[Planned]:
    """Return the predictions of :func:`plan` without the variants of the best one."""
    recomputes = RECOMPUTING.keys().isdisjoint(given)
    num_runs = sum(len(_stages(layout)) for layout in {layout.with_few_replicas() for layout in layouts})
    if num_runs <= _MOST_RUNS_OF_CORE * _at_once():
        planned = dry_runs.planned(layouts, where)
        too_large = _too_large(planned, memory) if recomputes else []
        return order(planned + dry_runs.planned(too_large, where))
    bases = base_layouts(layouts, recomputes)
    found = dry_runs(bases)
    runs = {base: found[base] for base in bases}
    estimate = Estimates(runs, where and where(_operations(found)), "num_microbatches" in given)
    if all(estimate(layout).peak is None for layout in layouts):
        # The small layouts that tell of the others cannot be used, for example because experts need more ranks.
        return order(dry_runs.planned(layouts[: _MOST_RUNS_OF_CORE * _at_once()], where))
    checked: dict[Layout, Planned] = {}

    def predicted(some: Iterable[Layout]) -> list[Planned]:
        return [checked.get(layout) or estimate(layout) for layout in some]

    for num_rounds in itertools.count():
        planned = predicted(layouts)
        planned = order(planned + predicted(_too_large(planned, memory) if recomputes else []))
        best = [one for one in planned if one.is_estimated and one.fits(memory)][: _at_once()]
        if not best or best[0] is not planned[0] or num_rounds == _MOST_ROUNDS:
            break
        exact = dry_runs.planned([one.layout for one in best], where)
        checked |= {one.layout: one for one in exact}
        estimate.learn(exact)
    return planned


def _checked_first(planned: Sequence[Planned], memory: int | None) -> list[Planned]:
    """Return the predictions with the best one that fits and is not estimated in front, if there is one."""
    checked = [one for one in planned if one.fits(memory) and not one.is_estimated][:1]
    return [*checked, *(one for one in planned if one not in checked)]


_MOST_RUNS_OF_CORE = 8
"""With more dry runs for each core, most layouts are estimated."""

_MOST_ROUNDS = 2
"""Number of times that the best estimates are replaced by dry runs."""


def _stages(layout: Layout) -> list[int]:
    """Return the stages of a pipeline that need something else than the others."""
    return sorted({0, 1, layout.pp - 1} & set(range(layout.pp)))


def _at_once() -> int:
    return num_cores()


def _too_large(planned: Sequence[Planned], memory: int | None) -> list[Layout]:
    """Return the layouts that need too much, with recomputed activations."""
    return [one.layout.having(**RECOMPUTING) for one in planned if one.peak is not None and not one.fits(memory)]


def _in_order(planned: Sequence[Planned], memory: int | None, by_memory: bool) -> list[Planned]:
    """Return predictions in the order of :func:`plan`."""

    def key(one: Planned) -> tuple[bool, bool, float]:
        fits = one.fits(memory)
        return one.peak is None, not fits, -one.rate if fits and not by_memory else one.peak or 0

    return sorted(planned, key=key)


def _operations(found: Mapping[Layout, Sequence[DryRun] | str]) -> set[Operation]:
    runs = [run for outcome in found.values() if not isinstance(outcome, str) for run in outcome]
    return {operation for run in runs for work in (run.work, run.optimizer) for operation in work.operations}


class _DryRuns:
    """Make dry runs of layouts, several at a time.

    Args:
        make: As for :func:`plan`, like the others.
        backend: Backend of the ranks.
        num_devices: Number of devices of a node; None: all ranks are on one.
        on_progress: Function that is called as dry runs end.
    """

    def __init__(
        self, make: Make, backend: str, num_devices: int | None, on_progress: Callable[[int, int], None]
    ) -> None:
        self._make = make
        self._backend = backend
        self._num_devices = num_devices
        self._is_prepared: bool | None = None
        """Whether the data are prepared; None: it was not tried yet."""
        self._on_progress = on_progress
        self._found: dict[Layout, list[DryRun] | str] = {}
        self._are_divided = False

    def planned(
        self, layouts: Sequence[Layout], where: Callable[[Collection[Operation]], Where] | None
    ) -> list[Planned]:
        """Return the predictions of ``layouts``."""
        found = self(layouts)
        known = where(_operations(found)) if where is not None and layouts else None
        predictions = []
        for layout, outcome in found.items():
            if isinstance(outcome, str):
                predictions.append(Planned(layout, why_not=outcome))
            else:
                predictions.append(Planned.of(layout, outcome, known))
        return predictions

    def __call__(self, layouts: Sequence[Layout]) -> dict[Layout, list[DryRun] | str]:
        """Return the dry runs of the ranks of each layout's stages, or the reason why it cannot be used.

        Layouts that differ only in the number of replicas share dry runs, unless the batch of a rank depends on it.
        """
        if not self._are_divided:
            few = {layout: layout.with_few_replicas() for layout in layouts}
            self._run(few.values())
            self._are_divided = batches_are_divided(self._found.values())
            if not self._are_divided:
                return {layout: self._found[few[layout]] for layout in layouts}
        self._run(layouts)
        return {layout: self._found[layout] for layout in layouts}

    def _run(self, layouts: Iterable[Layout]) -> None:
        """Make the dry runs of layouts that have none yet."""
        new = [layout for layout in dict.fromkeys(layouts) if layout not in self._found]
        runs = [(layout, stage) for layout in new for stage in _stages(layout)]
        if new and self._is_prepared is None:
            self._prepare(new[0])
        calls = [
            partial(
                run_as_rank,
                partial(self._make, layout),
                *self._nodes(layout),
                stage * layout.num_ranks // layout.pp,
                self._backend,
                not self._is_prepared,
            )
            for layout, stage in runs
        ]
        self._found |= {layout: [] for layout in new}
        for done, (index, result, error) in enumerate(in_forks(calls, _at_once()), 1):
            layout = runs[index][0]
            outcome = self._found[layout]
            if result is None:
                self._found[layout] = _reason(error)
            elif not isinstance(outcome, str):
                outcome.append(result)
            self._on_progress(done, len(runs))

    def _nodes(self, layout: Layout) -> tuple[int, int]:
        """Return the number of nodes of a layout, and of the devices of each of them."""
        num_devices = self._num_devices
        if num_devices is None or layout.num_ranks % num_devices:
            return 1, layout.num_ranks
        return layout.num_ranks // num_devices, num_devices

    def _prepare(self, layout: Layout) -> None:
        """Let the data be prepared once. If that fails, each dry run tries it, and says why."""
        try:
            in_fork(partial(prepare_data, partial(self._make, layout), *self._nodes(layout), self._backend))
            self._is_prepared = True
        except Exception:
            self._is_prepared = False


def _reason(error: BaseException | None) -> str:
    """Return the first line of the text of an error, with its type if the text alone may say nothing."""
    text = str(error).strip().split("\n")[0]
    is_sentence = isinstance(error, (ValueError, RuntimeError, MisconfigurationException)) and " " in text
    return text if is_sentence else f"{type(error).__name__}: {text}" if text else type(error).__name__
