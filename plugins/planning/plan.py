"""Predict the memory and the time of many layouts by dry runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dist.plugins.planning.dry_run import DryRun, run_as_rank
from lightning_dist.plugins.planning.estimates import Estimates, base_layouts
from lightning_dist.plugins.planning.forked import in_forks
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.step_time import Where
from lightning_dist.run.simulation import Operation

__all__ = ["Make", "plan"]

Make = Callable[[Layout], tuple[LightningModule, Any, Mapping[str, Any]]]
"""Function that makes the module, its data, and the arguments of a Trainer, for a layout."""


def plan(
    make: Make,
    layouts: Sequence[Layout],
    memory: int | None,
    backend: str,
    shares_replicas: bool,
    where: Callable[[Collection[Operation]], Where] | None = None,
    recomputes: bool = True,
    by_memory: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> list[Planned]:
    """Predict the memory and the time of ``layouts`` by dry runs, several at a time.

    Args:
        make: Function that makes what is trained; it is called in forked processes.
        layouts: The layouts.
        memory: Bytes of the memory of a device; None: it has no limit.
        backend: Backend over which the ranks would communicate, ``"gloo"`` or ``"nccl"``.
        shares_replicas: Whether layouts that differ only in the number of replicas share one dry run. They do not where
            the batch of a rank depends on this number.
        where: Function that returns the speed of the devices, given the operations of all layouts, which it may
            measure; None: times are not predicted.
        recomputes: Whether those that need too much are tried once more with recomputed activations.
        by_memory: Whether those that fit are sorted by their peaks.
        on_progress: Function that is called with the number of dry runs that have ended and the number of all.

    Returns:
        The prediction of each layout: those that fit, the fastest first; those that do not, those that need the least
        first; and those that cannot be used. If no times are predicted, those that fit have the order of ``layouts``.
    """
    order = partial(_in_order, memory=memory, by_memory=by_memory)
    dry_runs = _DryRuns(make, backend, shares_replicas, on_progress)
    num_runs = sum(len(_stages(layout)) for layout in {dry_runs.key(layout) for layout in layouts})
    if num_runs <= _MOST_RUNS_OF_CORE * _at_once() or not shares_replicas:
        planned = dry_runs.planned(layouts, where)
        too_large = _too_large(planned, memory) if recomputes else []
        return order(planned + dry_runs.planned(too_large, where))
    bases = base_layouts(layouts, recomputes)
    found = dry_runs(bases)
    known = where and where(_operations(found))
    estimate = Estimates({base: found[dry_runs.key(base)] for base in bases}, known)
    planned = [estimate(layout) for layout in layouts]
    too_large = _too_large(planned, memory) if recomputes else []
    planned = order(planned + [estimate(layout) for layout in too_large])
    while (best := planned[0]).is_estimated and best.fits(memory):
        # A layout that turns out to be worse than estimated makes place for the next one.
        (exact,) = dry_runs.planned([best.layout], where)
        planned = order([exact, *planned[1:]])
    return planned


_MOST_RUNS_OF_CORE = 8
"""With more dry runs for each core, most layouts are estimated."""


def _stages(layout: Layout) -> list[int]:
    """Return the stages of a pipeline that need something else than the others."""
    return sorted({0, 1, layout.pp - 1} & set(range(layout.pp)))


def _at_once() -> int:
    return os.cpu_count() or 1


def _too_large(planned: Sequence[Planned], memory: int | None) -> list[Layout]:
    """Return the layouts that need too much, with recomputed activations."""
    return [replace(one.layout, recomputes=True) for one in planned if one.peak is not None and not one.fits(memory)]


def _in_order(planned: Sequence[Planned], memory: int | None, by_memory: bool) -> list[Planned]:
    """Return predictions in the order of :func:`plan`."""

    def key(one: Planned) -> tuple[bool, bool, float]:
        fits = one.fits(memory)
        return one.peak is None, not fits, -one.samples_per_s if fits and not by_memory else one.peak or 0

    return sorted(planned, key=key)


def _operations(found: Mapping[Layout, Sequence[DryRun] | str]) -> set[Operation]:
    runs = [run for outcome in found.values() if not isinstance(outcome, str) for run in outcome]
    return {operation for run in runs for work in (run.work, run.optimizer) for operation in work.operations}


class _DryRuns:
    """Make dry runs of layouts, several at a time.

    Args:
        make: As for :func:`plan`, like the others.
        backend: Backend of the ranks.
        shares_replicas: Whether layouts that differ only in the number of replicas share one dry run.
        on_progress: Function that is called as dry runs end.
    """

    def __init__(
        self, make: Make, backend: str, shares_replicas: bool, on_progress: Callable[[int, int], None]
    ) -> None:
        self._make = make
        self._backend = backend
        self._shares_replicas = shares_replicas
        self._on_progress = on_progress

    def key(self, layout: Layout) -> Layout:
        """Return the layout whose dry run is that of ``layout``."""
        return layout.with_few_replicas() if self._shares_replicas else layout

    def planned(
        self, layouts: Sequence[Layout], where: Callable[[Collection[Operation]], Where] | None
    ) -> list[Planned]:
        """Return the predictions of ``layouts``."""
        found = self(layouts)
        known = where(_operations(found)) if where is not None and layouts else None
        predictions = []
        for layout in layouts:
            outcome = found[self.key(layout)]
            if isinstance(outcome, str):
                predictions.append(Planned(layout, why_not=outcome))
            else:
                predictions.append(Planned.of(layout, outcome, known))
        return predictions

    def __call__(self, layouts: Sequence[Layout]) -> dict[Layout, list[DryRun] | str]:
        """Return the dry runs of the ranks of each layout's stages, or the reason why it cannot be used, by its key."""
        keys = dict.fromkeys(map(self.key, layouts))
        runs = [(key, stage) for key in keys for stage in _stages(key)]
        calls = [
            partial(
                run_as_rank, partial(self._make, key), 1, key.num_ranks, stage * key.num_ranks // key.pp, self._backend
            )
            for key, stage in runs
        ]
        found: dict[Layout, list[DryRun] | str] = {key: [] for key in keys}
        for done, (index, result, error) in enumerate(in_forks(calls, _at_once()), 1):
            key = runs[index][0]
            outcome = found[key]
            if result is None:
                found[key] = (str(error).strip() or type(error).__name__).split("\n")[0]
            elif not isinstance(outcome, str):
                outcome.append(result)
            self._on_progress(done, len(runs))
        return found
