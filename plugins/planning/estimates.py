"""Estimate what many layouts need from the dry runs of a few, in which each axis has one or two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_dist.plugins.planning.choices import RECOMPUTING
from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.step_time import (
    Busy,
    Where,
    busy_seconds,
    messages,
    peak_flops_per_s,
    step_time,
)
from lightning_dist.run.telemetry.batch import BatchSize

__all__ = ["Estimates", "base_layouts", "batches_are_divided"]

_REPLICAS, _SHARDS, _MORE_SHARDS = Layout(dp_replicate=2), Layout(dp_shard=2), Layout(dp_shard=8)
_OF_AXIS = {
    "tp": replace(_SHARDS, tp=2),
    "cp": replace(_SHARDS, cp=2),
    "pp": replace(_SHARDS, pp=2),
}
_RECOMPUTING = _SHARDS.having(**RECOMPUTING)
_SMALLER_BATCH = replace(_SHARDS, dp_replicate=4)


def base_layouts(layouts: Sequence[Layout], recomputes: bool) -> list[Layout]:
    """Return the layouts whose dry runs tell what ``layouts`` need.

    Args:
        layouts: The layouts that are estimated.
        recomputes: Whether they are also estimated with recomputed activations.
    """
    used = [layout for axis, layout in _OF_AXIS.items() if any(one.sizes[axis] > 1 for one in layouts)]
    return [_SHARDS, _MORE_SHARDS, _SMALLER_BATCH, _REPLICAS, *used, *([_RECOMPUTING] if recomputes else [])]


def batches_are_divided(runs: Iterable[Sequence[DryRun] | str]) -> bool:
    """Return whether ranks have smaller batches where more of them have different ones.

    Args:
        runs: Dry runs of layouts, or the reasons why they cannot be used.

    Returns:
        Whether dry runs with different numbers of such ranks have batches of different sizes; True also if there is
        only one such number, which does not tell.
    """
    samples = {
        run.num_data_parallel: run.batch.samples for found in runs if not isinstance(found, str) for run in found
    }
    return len(samples) < 2 or len(set(samples.values())) > 1


class Estimates:
    """Estimate the memory and the time of layouts.

    Along each axis, a part of a number stays the same on all ranks, and the rest is divided among them: the two are
    found from the dry runs with one and with two ranks (for ``dp_shard``, with two and with eight). Axes are taken to
    act independently. Messages are those of the dry runs with the sizes of the groups of the layout. If the batch of a
    rank is a part of a global batch, what depends on its size is found from dry runs with the same shards and other
    numbers of replicas.

    What is learned of some layouts corrects the estimates of others that split the model along the same axes: these are
    multiplied by the quotient of what was found and what was estimated for the layout whose sizes are the nearest.

    Args:
        runs: The dry runs of :func:`base_layouts`, or the reason why a layout cannot be used.
        where: What is known of the devices; None: no time is predicted.
        keeps_microbatches: Whether the number of microbatches is given, and does not grow with that of the stages.
    """

    def __init__(
        self, runs: Mapping[Layout, Sequence[DryRun] | str], where: Where | None, keeps_microbatches: bool = False
    ) -> None:
        self._keeps_microbatches = keeps_microbatches
        self._where = where
        self._reasons = {layout: found for layout, found in runs.items() if isinstance(found, str)}
        self._runs = {
            layout: max(found, key=lambda run: run.peak) for layout, found in runs.items() if not isinstance(found, str)
        }
        self._busy = {} if where is None else {layout: busy_seconds(run, where) for layout, run in self._runs.items()}
        self._learned: list[Planned] = []

    def learn(self, found: Iterable[Planned]) -> None:
        """Correct the estimates by predictions that are none.

        Args:
            found: The predictions, of layouts that can be estimated.
        """
        self._learned += found

    def __call__(self, layout: Layout) -> Planned:
        """Return the estimate for a layout."""
        for one in self._learned:
            # As many ranks have different batches, and only the number of shards is another one.
            if one.peak is None and _split(one.layout) == _split(layout):
                return Planned(layout, why_not=one.why_not)
        estimate = self._uncorrected(layout)
        similar = [one for one in self._learned if one.peak is not None and _is_similar(one.layout, layout)]
        if not similar or estimate.peak is None:
            return estimate
        nearest = min(similar, key=lambda one: _distance(one.layout, layout))
        return estimate.corrected(nearest, self._uncorrected(nearest.layout))

    def _uncorrected(self, layout: Layout) -> Planned:
        base = _SHARDS if layout.dp_shard > 1 or layout.cp > 1 else _REPLICAS
        of_axes = {axis: two for axis, two in _OF_AXIS.items() if layout.sizes[axis] > 1}
        others = (_SHARDS, _MORE_SHARDS, _SMALLER_BATCH)
        needed = [base, *others, *of_axes.values(), *([_RECOMPUTING] if layout.recomputes else [])]
        reason = self._why_not(layout, needed)
        if reason:
            return Planned(layout, why_not=reason)
        batch, first = self._batch(layout), self._runs[_SHARDS].batch
        added_samples = batch.samples - first.samples
        batches = batch.samples / first.samples if added_samples else 1.0

        def scaled(number_of: Callable[[Layout], float]) -> float:
            number, one, with_smaller_batch = number_of(base), number_of(_SHARDS), number_of(_SMALLER_BATCH)
            if base is _SHARDS:  # With n ranks: a + b / n.
                divided = (with_smaller_batch - number_of(_MORE_SHARDS)) / (
                    1 / _SHARDS.dp_shard - 1 / _MORE_SHARDS.dp_shard
                )
                number += divided * (1 / layout.dp_shard - 1 / _SHARDS.dp_shard)
            if added_samples:
                number += (one - with_smaller_batch) / self._samples_between * added_samples
            for axis, two in of_axes.items():
                number *= _fraction(one, number_of(two), layout.sizes[axis])
            if layout.recomputes and one:
                number *= number_of(_RECOMPUTING) / one
            return number

        resident = scaled(lambda one: self._runs[one].resident)
        transient = scaled(lambda one: self._runs[one].peak - self._runs[one].resident)
        time = None
        if self._where is not None:
            num_microbatches = self._runs[of_axes.get("pp", base)].num_microbatches
            if not self._keeps_microbatches:
                num_microbatches = min(num_microbatches * layout.pp // 2, batch.samples // self._num_batches)
            busy = Busy(
                scaled(lambda one: self._busy[one].compute),
                scaled(lambda one: self._busy[one].optimizer),
                scaled(lambda one: self._busy[one].host),
                (layout.pp - 1) / max(num_microbatches, 1),
            )
            replicas = [_SMALLER_BATCH] if layout.dp_replicate > 1 and base is _SHARDS else []
            sent = self._messages(layout, [base, *of_axes.values(), *replicas], self._where, batches)
            time = step_time(layout, busy, sent, self._where)
        model_flops = self._runs[_SHARDS].work.model_flops * batches
        return Planned(
            layout,
            round(resident),
            round(resident + transient),
            time=time,
            batch=batch,
            model_flops=model_flops / (layout.tp * layout.cp * layout.pp),
            peak_flops_per_s=0.0 if self._where is None else peak_flops_per_s(self._runs[base], self._where),
            is_estimated=True,
        )

    @property
    def _num_batches(self) -> int:
        """Return the number of a rank's batches in a step."""
        return self._runs[_SHARDS].num_batches

    @property
    def _samples_between(self) -> int:
        """Return the number of samples that a rank of ``_SMALLER_BATCH`` has less than one of ``_SHARDS``."""
        return self._runs[_SHARDS].batch.samples - self._runs[_SMALLER_BATCH].batch.samples

    def _why_not(self, layout: Layout, needed: Sequence[Layout]) -> str:
        """Return the reason why a layout cannot be used or estimated; "": there is none."""
        for one in needed:
            if one in self._reasons:
                return self._reasons[one]
        if not self._samples_between:
            return ""
        own = self._runs[_SHARDS].batch.samples // self._num_batches
        samples, ranks = own * _SHARDS.num_data_parallel, layout.num_data_parallel
        if samples % ranks:
            return f"A batch of {samples} samples cannot be divided among {ranks} ranks."
        if samples // ranks < layout.pp:
            return f"A rank's batch of {samples // ranks} has fewer samples than the pipeline has stages ({layout.pp})."
        return ""

    def _batch(self, layout: Layout) -> BatchSize:
        """Return the size of a rank's batch."""
        first, ranks = self._runs[_SHARDS].batch, layout.num_data_parallel
        if not self._samples_between:
            return first
        return BatchSize(*(number * _SHARDS.num_data_parallel // ranks for number in (first.samples, first.tokens)))

    def _messages(self, layout: Layout, bases: Sequence[Layout], where: Where, batches: float) -> dict[str, float]:
        """Return the seconds of messages over each axis, from the dry run that has this axis.

        Args:
            layout: The layout that is estimated.
            bases: The dry runs, each with one axis of the layout.
            where: What is known of the devices.
            batches: Size of a rank's batch in relation to that of the dry runs, to which messages with activations are
                proportional.
        """
        found: dict[str, float] = {}
        for base in bases:
            for axes, seconds in messages(layout, self._runs[base], where).items():
                if axes not in found:
                    sent_over = axes.split(" x ")
                    others = [axis for axis in _OF_AXIS if axis not in sent_over and base.sizes[axis] == 1]
                    found[axes] = seconds / math.prod(layout.sizes[axis] for axis in others)
                    if "dp_shard" not in sent_over and not _OF_AXIS.keys().isdisjoint(sent_over):
                        found[axes] *= batches
                    elif sent_over == ["dp_replicate"]:  # Replicas reduce the gradients of their shards.
                        found[axes] *= base.dp_shard / layout.dp_shard
        if any("dp_shard" in axes.split(" x ") and axes != "dp_shard" for axes in found):
            found.pop("dp_shard", None)  # Ranks of cp share parameters as well, so that they are sent over both axes.
        return found


def _split(layout: Layout) -> tuple[int, ...]:
    """Return the sizes of the axes that split a model."""
    return tuple(layout.sizes[axis] for axis in _OF_AXIS)


def _is_similar(one: Layout, other: Layout) -> bool:
    """Return whether two layouts split a model along the same axes and have the same options."""
    return one.options == other.options and all(
        (size > 1) == (same > 1) for size, same in zip(_split(one), _split(other), strict=True)
    )


def _distance(one: Layout, other: Layout) -> float:
    """Return how much the sizes of two layouts differ, as the sum of the numbers of doublings."""
    return sum(abs(math.log2(size / other.sizes[axis])) for axis, size in one.sizes.items())


def _fraction(one: float, two: float, num_ranks: int) -> float:
    """Return the fraction of a number that each of some ranks has, from that of one rank and that of each of two.

    A pipeline divides a batch into microbatches as well, so that each of two ranks has less than the half.
    """
    if not one:
        return 1.0
    if two >= one:
        return two / one
    if two < one / 2:
        return two / one * 2 / num_ranks
    stays = min(2 * two / one - 1, 1.0)
    return stays + (1 - stays) / num_ranks
