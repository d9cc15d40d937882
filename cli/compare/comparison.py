"""Compare runs, or groups of runs, by their parameters and by numbers that are computed from their metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from lightning_dist.cli.compare.measures import MFU, PEAK, Better, losses_first, measures_of
from lightning_dist.cli.compare.reading import Run
from lightning_dist.cli.compare.scaling import SAMPLES, TOKENS, WORLD_SIZE, Scaling, scaling_of, world_size
from lightning_dist.cli.compare.target import Target
from lightning_dist.cli.errors import closest

_SAYS_NOTHING = ("None", "False", "")
_AS_GOOD = 5e-4
"""Relative difference of numbers that are equal in the digits that are shown."""
_SHOWN_OTHERWISE = {"trainer.logger.run_name", "trainer.logger.experiment_name"}


@dataclass(frozen=True)
class Column:
    """Hold runs that are compared with those of other columns: one run, or a group.

    Args:
        label: The run's name, or the value of the parameter that the runs have in common.
        runs: The runs of the column, in the order of the store.
    """

    label: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Cell:
    """Hold what the runs of a column have in one row.

    Args:
        value: The number, or the mean of the runs' numbers; None if no run has one.
        spread: The sample standard deviation; None if fewer than two runs have a number.
        num_runs: How many of the column's runs have a number.
        missing: Text that stands for the number that the other runs lack.
    """

    value: float | None
    spread: float | None
    num_runs: int
    missing: str = "-"


@dataclass(frozen=True)
class Row:
    """Hold a number of every column.

    Args:
        metric: Name of the metric, or of what is computed from several.
        statistic: How the history of the metric becomes a number.
        better: Which of two numbers is better; None: neither.
        cells: The numbers, one for each column.
        is_fraction: Whether the numbers are shown as percentages.
    """

    metric: str
    statistic: str
    better: Better
    cells: Sequence[Cell]
    is_fraction: bool = False


class Comparison:
    """Hold columns of runs, and what they have in each row.

    Args:
        columns: The runs; the other columns are compared with the first one.
        target: The target whose time and steps are shown; None: no such rows.
        grouped_by: Parameter whose values the columns are; None: each column is a run.
    """

    def __init__(self, columns: Sequence[Column], target: Target | None, grouped_by: str | None = None) -> None:
        self.columns = columns
        self.target = target
        self.grouped_by = grouped_by
        self.parameters = _different_parameters(columns)
        self.metrics = _compared_metrics(self.runs)
        self.scaling = scaling_of(self.runs) if grouped_by == WORLD_SIZE else None
        """How the throughput grows with the number of processes; None: columns are not grouped by it, or it does not
        vary."""
        self.notes = [_DIFFERENT_PEAKS] if PEAK in self.metrics else []
        """Sentences about what cannot be compared."""
        scaling_rows = [] if self.scaling is None else [_scaling_row(columns, self.scaling)]
        self.rows = [*_target_rows(columns, target), *scaling_rows, *_metric_rows(columns, self.metrics)]

    @property
    def runs(self) -> list[Run]:
        """Return the runs of all columns."""
        return [run for column in self.columns for run in column.runs]

    def is_best(self, row: Row, index: int) -> bool:
        """Return whether a column has the best number of a row, or one that differs from it by less than 0.05%.

        It returns False for all columns if this is true of all, and for a group of which not all runs have a number.
        """
        if row.better is None:
            return False
        complete = {
            place: cell.value
            for place, (cell, column) in enumerate(zip(row.cells, self.columns, strict=True))
            if cell.value is not None and cell.num_runs == len(column.runs) and not math.isnan(cell.value)
        }
        best = (min if row.better == "lower" else max)(complete.values(), default=math.nan)
        winners = {place for place, value in complete.items() if math.isclose(value, best, rel_tol=_AS_GOOD)}
        return index in winners and len(winners) < len(complete)

    def ratio(self, row: Row, index: int) -> float | None:
        """Return a column's number divided by that of the first; None if one is missing or the first is zero."""
        value, first = row.cells[index].value, row.cells[0].value
        return None if index == 0 or value is None or not first else value / first


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """Return a column for each run; the labels of runs that have the same name get the start of the ID."""
    names = [run.name for run in runs]
    return [Column(run.name if names.count(run.name) == 1 else f"{run.name} {run.id[:8]}", [run]) for run in runs]


def groups_of(runs: Sequence[Run], parameter: str) -> list[Column]:
    """Return a column for each value of a parameter, in the order in which the values appear.

    Numbers of processes ascend, so that the others are compared with the smallest one.
    """
    if parameter == WORLD_SIZE:
        runs = sorted(runs, key=lambda run: world_size(run) or math.inf)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_parameters(run).get(parameter, "-"), []).append(run)
    return [Column(value, members) for value, members in groups.items()]


def find_parameter(runs: Sequence[Run], name: str) -> str:
    """Return the full name of a parameter.

    Args:
        runs: The compared runs, of which at least one has the parameter.
        name: The full name, or its end behind a dot. Parameters of ``dist`` come first, because these are what a
            strategy has made of the configuration.

    Raises:
        ValueError: If there is no such parameter, or if there are several.
    """
    keys = sorted({key for run in runs for key in _parameters(run)})
    if _as_flag(name) in keys:
        return _as_flag(name)
    ends = [key for key in keys if key.endswith(f".{name}")]
    for candidates in ([key for key in ends if key.startswith("dist.")], ends):
        if len(candidates) == 1:
            return candidates[0]
    if ends:
        raise ValueError(f"--by={name!r} is ambiguous: give one of {', '.join(ends)}.")
    short = {key.rpartition(".")[2] for key in keys}
    raise ValueError(f"--by={name!r}: none of the runs has such a parameter{closest(name, {*keys, *short})}")


def baseline_first(columns: Sequence[Column], name: str) -> list[Column]:
    """Move the column that is named by its label, or by the name or the start of the ID of its only run, to the front.

    Raises:
        ValueError: If there is no such column, or if there are several.
    """
    matches = [column for column in columns if column.label == name] or [
        column
        for column in columns
        if len(column.runs) == 1 and (column.runs[0].name == name or column.runs[0].id.startswith(name))
    ]
    labels = [column.label for column in columns]
    if not matches:
        raise ValueError(
            f"--baseline={name!r} is none of what is compared{closest(name, labels)} Give one of {', '.join(labels)}."
        )
    if len(matches) > 1:
        ids = ", ".join(column.runs[0].id for column in matches)
        raise ValueError(f"--baseline={name!r} is ambiguous: give the start of one ID of {ids}.")
    return [*matches, *(column for column in columns if column is not matches[0])]


def _different_parameters(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Return the names of the parameters that differ between columns, and each column's value as text.

    A run that lacks a parameter is taken to agree with one whose value says as much: None, False, or for the size of an
    axis 1. Parameters that end alike and have the same values are shown once: LightningCLI and ``save_hyperparameters``
    both log a module's.
    """
    settings = [
        [{"experiment": run.experiment, **_parameters(run), **run.tags} for run in column.runs] for column in columns
    ]
    rows: dict[str, list[str]] = {}
    shown: set[tuple[str, tuple[str, ...]]] = set()
    keys = {key for column in settings for run in column for key in run if key not in _SHOWN_OTHERWISE}
    for key in sorted(keys, key=_place_of_parameter):
        groups = [{run.get(key) for run in column} for column in settings]
        says_nothing = (*_SAYS_NOTHING, "1") if key.startswith("dist.layout.") else _SAYS_NOTHING
        meant = [{None if value in says_nothing else value for value in values} for values in groups]
        if all(values == meant[0] for values in meant):
            continue
        texts = [", ".join(sorted("-" if value is None else value for value in values)) for values in groups]
        same = (key.rpartition(".")[2], tuple(texts))
        if same not in shown:
            shown.add(same)
            rows[key] = texts
    return list(rows.items())


def _place_of_parameter(key: str) -> tuple[int, str]:
    """Return a key that sorts parameters: how runs were distributed, their configuration, their versions and tags."""
    if key.startswith("dist."):
        return (0 if key == "dist.strategy" else 1, key)
    return (4 if key.startswith(("version.", "git.")) else 2 if "." in key else 3, key)


def _parameters(run: Run) -> dict[str, str]:
    """Return a run's parameters by the names that the command's flags have.

    A strategy may be given by its name in one run, and by a class with arguments in another; both have one name then.
    """
    return {_as_flag(key): value for key, value in run.params.items()}


def _as_flag(key: str) -> str:
    return key.replace(".init_args.", ".").removesuffix(".class_path")


def _compared_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the names of the metrics in the order of the rows, without samples where tokens say as much."""
    names = {name for run in runs for name in run.series}
    # Where peaks differ, their row stands in the place of that of utilizations, and shows why that is missing.
    names.discard(MFU if _have_different_peaks(runs) else PEAK)
    if all(TOKENS in run.series for run in runs if SAMPLES in run.series):
        names.discard(SAMPLES)
    return sorted(names, key=losses_first)


def _have_different_peaks(runs: Sequence[Run]) -> bool:
    """Return whether the utilizations of the runs are relative to different peaks, so that they cannot be compared."""
    peaks = [run.series[PEAK].values[-1] for run in runs if PEAK in run.series]
    return bool(peaks) and max(peaks) > (1 + _SAME_PEAK) * min(peaks)


_DIFFERENT_PEAKS = (
    f"{MFU} is left out, because it is relative to different peaks of the devices ({PEAK}, in TFLOP/s of a device)."
)

_SAME_PEAK = 0.01
"""The largest relative difference of peaks that are taken to be the same."""


def _target_rows(columns: Sequence[Column], target: Target | None) -> list[Row]:
    if target is None:
        return []
    seconds, steps = [], []
    for column in columns:
        reached = [time for run in column.runs if (time := target.reached(run)) is not None]
        missing = "not reached" if any(target.metric in run.series for run in column.runs) else "-"
        seconds.append(_cell([time[0] for time in reached], missing))
        steps.append(_cell([time[1] for time in reached], missing))
    return [Row(f"seconds to {target}", "", "lower", seconds), Row(f"steps to {target}", "", "lower", steps)]


def _scaling_row(columns: Sequence[Column], scaling: Scaling) -> Row:
    cells = [_cell(scaling.efficiencies(column.runs)) for column in columns]
    return Row("scaling efficiency", scaling.metric.rpartition("/")[2], None, cells, is_fraction=True)


def _metric_rows(columns: Sequence[Column], metrics: Sequence[str]) -> list[Row]:
    rows = []
    for name in metrics:
        for measure in measures_of(name):
            cells = [
                _cell([measure(run.series[name].values) for run in column.runs if name in run.series])
                for column in columns
            ]
            rows.append(Row(name, measure.statistic, measure.better, cells, measure.is_fraction))
    return rows


def _cell(numbers: Sequence[float], missing: str = "-") -> Cell:
    if not numbers:
        return Cell(None, None, 0, missing)
    has_spread = len(numbers) > 1 and all(map(math.isfinite, numbers))
    return Cell(sum(numbers) / len(numbers), stdev(numbers) if has_spread else None, len(numbers), missing)
