"""Predict the memory of many layouts by dry runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dist.plugins.planning.dry_run import DryRun, run_as_rank
from lightning_dist.plugins.planning.forked import in_forks
from lightning_dist.plugins.planning.layouts import Layout

__all__ = ["Make", "Planned", "plan"]

Make = Callable[[Layout], tuple[LightningModule, Any, Mapping[str, Any]]]
"""Function that makes the module, its data, and the arguments of a Trainer, for a layout."""


@dataclass(frozen=True)
class Planned:
    """Hold what a layout needs.

    Args:
        layout: The layout.
        resident: Bytes of a rank's tensors between two steps, on the rank that needs the most in a step.
        peak: The largest number of bytes of a rank's tensors in a step, on any rank; None: it is unknown.
        why_not: The reason why it is unknown, such as the text by which the strategy refuses the layout; "": none.
    """

    layout: Layout
    resident: int | None
    peak: int | None
    why_not: str = ""

    def fits(self, memory: int | None) -> bool:
        """Return whether a rank needs at most 90% of its device.

        Args:
            memory: Bytes of the memory of a device; None: it has no limit.
        """
        return self.peak is not None and (memory is None or self.peak <= 0.9 * memory)


def plan(
    make: Make,
    layouts: Sequence[Layout],
    memory: int | None,
    backend: str,
    shares_replicas: bool,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> list[Planned]:
    """Predict the memory of ``layouts`` by dry runs, several at a time.

    Those that need too much are tried once more with activations that are computed again.

    Args:
        make: Function that makes what is trained; it is called in forked processes.
        layouts: The layouts.
        memory: Bytes of the memory of a device; None: it has no limit.
        backend: Backend over which the ranks would communicate, ``"gloo"`` or ``"nccl"``.
        shares_replicas: Whether layouts that differ only in the number of replicas share one dry run. They do not where
            the batch of a rank depends on this number.
        on_progress: Function that is called with the number of dry runs that have ended and the number of all.

    Returns:
        The prediction of each layout, in the order of ``layouts``, and then those with recomputed activations.
    """
    planned = _predicted(make, layouts, backend, shares_replicas, on_progress)
    too_large = [one.layout for one in planned if one.peak is not None and not one.fits(memory)]
    recomputing = [replace(layout, recomputes=True) for layout in too_large if not layout.recomputes]
    return planned + _predicted(make, recomputing, backend, shares_replicas, on_progress)


def _predicted(
    make: Make,
    layouts: Sequence[Layout],
    backend: str,
    shares_replicas: bool,
    on_progress: Callable[[int, int], None],
) -> list[Planned]:
    keys = [layout.with_few_replicas() if shares_replicas else layout for layout in layouts]
    runs = [(key, stage) for key in dict.fromkeys(keys) for stage in range(key.pp)]
    calls = [
        partial(run_as_rank, partial(make, key), 1, key.num_ranks, stage * key.num_ranks // key.pp, backend)
        for key, stage in runs
    ]
    of_key: dict[Layout, list[DryRun | BaseException]] = {key: [] for key in keys}
    for done, (index, result, error) in enumerate(in_forks(calls, os.cpu_count() or 1), 1):
        outcome = result if error is None else error
        assert outcome is not None
        of_key[runs[index][0]].append(outcome)
        on_progress(done, len(runs))
    return [_planned(layout, of_key[key]) for layout, key in zip(layouts, keys, strict=True)]


def _planned(layout: Layout, outcomes: Sequence[DryRun | BaseException]) -> Planned:
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        text = str(errors[0]).strip() or type(errors[0]).__name__
        return Planned(layout, None, None, text.split("\n")[0])
    worst = max((outcome for outcome in outcomes if isinstance(outcome, DryRun)), key=lambda run: run.peak)
    return Planned(layout, worst.resident, worst.peak)
