"""Estimate what many layouts need from the dry runs of a few, in which each axis has one or two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.step_time import Busy, Where, busy_seconds, messages, step_time

__all__ = ["Estimates", "base_layouts"]

_REPLICAS, _SHARDS, _MORE_SHARDS = Layout(dp_replicate=2), Layout(dp_shard=2), Layout(dp_shard=8)
_OF_AXIS = {
    "tp": replace(_SHARDS, tp=2),
    "cp": replace(_SHARDS, cp=2),
    "pp": replace(_SHARDS, pp=2),
}
_RECOMPUTING = replace(_SHARDS, recomputes=True)


def base_layouts(layouts: Sequence[Layout], recomputes: bool) -> list[Layout]:
    """Return the layouts whose dry runs tell what ``layouts`` need.

    Args:
        layouts: The layouts.
        recomputes: Whether they are also estimated with recomputed activations.
    """
    used = [layout for axis, layout in _OF_AXIS.items() if any(one.sizes[axis] > 1 for one in layouts)]
    return [_SHARDS, _MORE_SHARDS, _REPLICAS, *used, *([_RECOMPUTING] if recomputes else [])]


class Estimates:
    """Estimate the memory and the time of layouts.

    Along each axis, a part of a number stays the same on all ranks, and the rest is divided among them: the two are
    found from the dry runs with one and with two ranks (for ``dp_shard``, with two and with eight). Axes are taken to
    act independently. Messages are those of the dry runs with the sizes of the groups of the layout.

    Args:
        runs: The dry runs of :func:`base_layouts`, or the reason why a layout cannot be used.
        where: What is known of the devices; None: no time is predicted.
    """

    def __init__(self, runs: Mapping[Layout, Sequence[DryRun] | str], where: Where | None) -> None:
        self._where = where
        self._reasons = {layout: found for layout, found in runs.items() if isinstance(found, str)}
        self._runs = {
            layout: max(found, key=lambda run: run.peak) for layout, found in runs.items() if not isinstance(found, str)
        }
        self._busy = {} if where is None else {layout: busy_seconds(run, where) for layout, run in self._runs.items()}

    def __call__(self, layout: Layout) -> Planned:
        """Return the estimate for a layout."""
        base = _SHARDS if layout.dp_shard > 1 or layout.cp > 1 else _REPLICAS
        of_axes = {axis: two for axis, two in _OF_AXIS.items() if layout.sizes[axis] > 1}
        needed = [base, _SHARDS, _MORE_SHARDS, *of_axes.values(), *([_RECOMPUTING] if layout.recomputes else [])]
        for one in needed:
            if one in self._reasons:
                return Planned(layout, why_not=self._reasons[one])

        def scaled(number_of: Callable[[Layout], float]) -> float:
            number, one = number_of(base), number_of(_SHARDS)
            if base is _SHARDS:  # With n ranks: a + b / n.
                divided = (one - number_of(_MORE_SHARDS)) / (1 / _SHARDS.dp_shard - 1 / _MORE_SHARDS.dp_shard)
                number += divided * (1 / layout.dp_shard - 1 / _SHARDS.dp_shard)
            for axis, two in of_axes.items():
                number *= _fraction(one, number_of(two), layout.sizes[axis])
            if layout.recomputes and one:
                number *= number_of(_RECOMPUTING) / one
            return number

        resident = scaled(lambda one: self._runs[one].resident)
        transient = scaled(lambda one: self._runs[one].peak - self._runs[one].resident)
        time = None
        if self._where is not None:
            first = self._runs[of_axes.get("pp", base)].num_microbatches
            busy = Busy(
                scaled(lambda one: self._busy[one].compute),
                scaled(lambda one: self._busy[one].optimizer),
                scaled(lambda one: self._busy[one].host),
                max(first * layout.pp // 2, 1),
            )
            time = step_time(layout, busy, self._messages(layout, [base, *of_axes.values()], self._where), self._where)
        run = self._runs[base]
        return Planned(
            layout,
            round(resident),
            round(resident + transient),
            time=time,
            batch=run.batch,
            model_flops=run.work.model_flops / (layout.tp * layout.cp * layout.pp),
            is_estimated=True,
        )

    def _messages(self, layout: Layout, bases: Sequence[Layout], where: Where) -> dict[str, float]:
        """Return the seconds of messages over each axis, from the dry run that has this axis."""
        found: dict[str, float] = {}
        for base in bases:
            for axes, seconds in messages(layout, self._runs[base], where).items():
                if axes not in found:
                    others = [axis for axis in _OF_AXIS if axis not in axes.split(" x ") and base.sizes[axis] == 1]
                    found[axes] = seconds / math.prod(layout.sizes[axis] for axis in others)
        return found


def _fraction(one: float, two: float, num_ranks: int) -> float:
    """Return the fraction of a number that each of some ranks has, from that of one rank and that of each of two.

    A pipeline divides a batch into microbatches as well, so that each of two ranks has less than the half.
    """
    if not one:
        return 1.0
    if two < one / 2:
        return two / one * 2 / num_ranks
    stays = min(2 * two / one - 1, 1.0)
    return stays + (1 - stays) / num_ranks
