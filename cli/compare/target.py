"""Find when runs reach a target value of a metric."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_dist.cli.compare.measures import is_loss, losses_first, measures_of
from lightning_dist.cli.compare.reading import Run
from lightning_dist.cli.errors import closest

_FORM = re.compile(r"(?P<metric>[^<>=]+)(?P<sign><=|>=|=)(?P<value>[^<>=]+)")


@dataclass(frozen=True)
class Target:
    """Describe the value that a metric should reach.

    Args:
        metric: Name of the metric.
        sign: Whether values of at most or of at least ``value`` reach the target.
        value: The value that the metric should reach.
    """

    metric: str
    sign: Literal["<=", ">="]
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.value:g}"

    def reached(self, run: Run) -> tuple[float, int] | None:
        """Return the seconds since the run's first metric, and the step, at which it reached the target first."""
        series = run.series.get(self.metric)
        if series is not None:
            for step, seconds, value in zip(*series, strict=True):
                if value <= self.value if self.sign == "<=" else value >= self.value:
                    return seconds, step
        return None


def parse_target(text: str, runs: Sequence[Run]) -> Target:
    """Read ``METRIC=VALUE``, ``METRIC<=VALUE`` or ``METRIC>=VALUE``.

    Args:
        text: The value of ``--target``.
        runs: The compared runs. ``=`` means the sign that suits the metric, if one of them is known to be better.

    Raises:
        ValueError: If the text has another form, if no run has the metric, or if no run reaches the value.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"--target={text!r}: expected METRIC=VALUE, such as --target val/loss=1.85")
    metric, sign = match["metric"].strip(), match["sign"]
    try:
        value = float(match["value"])
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"--target={text!r}: {match['value']!r} is no number.")
    names = {name for run in runs for name in run.series}
    if metric not in names:
        has = f" They have {', '.join(sorted(names, key=losses_first))}." if names else ""
        raise ValueError(f"--target={text!r}: none of the runs has the metric {metric!r}{closest(metric, names)}{has}")
    if sign == "=":
        better = next((measure.better for measure in measures_of(metric)), None)
        if better is None:
            raise ValueError(
                f"--target={text!r}: it is not known whether a high {metric} is good: write '{metric}>={value:g}' or "
                f"'{metric}<={value:g}', in quotes."
            )
        sign = "<=" if better == "lower" else ">="
    target = Target(metric, "<=" if sign == "<=" else ">=", value)
    if all(target.reached(run) is None for run in runs):
        found = [(value, run.name) for run in runs if metric in run.series for value in _numbers(run, metric)]
        nearest = (min if sign == "<=" else max)(found, default=None)
        best = "" if nearest is None else f" The nearest is {nearest[0]:.6g}, of {nearest[1]}."
        raise ValueError(
            f"--target={text!r}: none of the runs reaches {target}.{best} Choose a value that one reaches."
        )
    return target


def common_target(runs: Sequence[Run]) -> Target | None:
    """Return a loss that all runs reach which have it: the highest of their lowest values, in three digits.

    Args:
        runs: The compared runs.

    Returns:
        The target, of the loss that most runs have, a validation loss if there are several; None without losses.
    """
    names = sorted({name for run in runs for name in run.series if is_loss(name)}, key=losses_first)
    if not names:
        return None
    metric = max(names, key=lambda name: sum(bool(_numbers(run, name)) for run in runs))
    lowest = [min(numbers) for run in runs if (numbers := _numbers(run, metric))]
    return Target(metric, "<=", _rounded_up(max(lowest))) if lowest else None


def _numbers(run: Run, metric: str) -> list[float]:
    series = run.series.get(metric)
    return [] if series is None else [value for value in series.values if math.isfinite(value)]


def _rounded_up(value: float) -> float:
    """Return the least number of three significant digits that is not below ``value``."""
    if value == 0:
        return 0.0
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return rounded if rounded >= value else round(rounded + 10.0**-digits, digits)
