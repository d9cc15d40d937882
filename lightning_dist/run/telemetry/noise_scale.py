"""Estimate the gradient noise scale, which is the batch size from which larger batches help little.

The noise scale is ``tr(S) / |G|^2``, where ``G`` is the gradient of the expected loss and ``S`` the covariance of the
gradient of one sample (McCandlish et al., 2018, https://arxiv.org/abs/1812.06162). A gradient that is the mean over
``b`` samples has the expected squared norm ``|G|^2 + tr(S) / b``. Two sizes of batches therefore give unbiased
estimates of both terms (appendix A.1): the gradient of each rank, and the mean of the ranks' gradients. With ``B``
samples in a step, training takes about ``1 + scale / B`` times the fewest possible steps, and ``1 + B / scale`` times
the fewest possible samples.

The ratio of two estimates is biased and its error is not symmetric, so that the estimates are averaged over many steps
first, and the interval is Fieller's (1954, "Some problems in interval estimation"): the ratios for which the difference
``tr(S) - ratio * |G|^2`` is not significant by Student's t-test. Since weights change slowly, the estimates of
consecutive steps are averaged in blocks before their variance is computed.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean
from typing import NamedTuple

__all__ = ["NoiseScale", "NoiseScaleEstimator"]

_NUM_BLOCKS = 20
_QUANTILE = 2.0930
"""The 97.5% quantile of Student's t-distribution with 19 degrees of freedom, one fewer than there are blocks."""


class NoiseScale(NamedTuple):
    """Hold an estimate of the noise scale.

    Args:
        scale: The noise scale, in samples; infinity if no gradient can be told from the noise.
        low: Lower end of the 95% interval, in samples.
        high: Upper end of the 95% interval, in samples; infinity if it has none.
        num_steps: Number of steps that the estimate is from.
    """

    scale: float
    low: float
    high: float
    num_steps: int


class _Step(NamedTuple):
    """Hold the unbiased estimates that a step gives: of ``tr(S)`` and of ``|G|^2``."""

    trace: float
    square: float


class NoiseScaleEstimator:
    """Estimate the noise scale from squared norms of gradients, over the latest steps.

    Args:
        window: Number of steps over which estimates are averaged, 20 or more.

    Raises:
        ValueError: If ``window`` is less than 20.
    """

    def __init__(self, window: int) -> None:
        if window < _NUM_BLOCKS:
            raise ValueError(f"window={window} must be at least {_NUM_BLOCKS} steps, from which an interval follows.")
        self._steps: deque[_Step] = deque(maxlen=window)

    def add(self, rank_square: float, mean_square: float, samples_of_rank: int, num_ranks: int) -> None:
        """Add a step.

        Args:
            rank_square: Squared norm of a rank's gradient, the mean over the ranks.
            mean_square: Squared norm of the mean of the ranks' gradients.
            samples_of_rank: Number of samples of which each rank's gradient is the mean.
            num_ranks: Number of ranks with different samples, 2 or more.
        """
        small, large = samples_of_rank, samples_of_rank * num_ranks
        trace = (rank_square - mean_square) / (1 / small - 1 / large)
        square = (large * mean_square - small * rank_square) / (large - small)
        self._steps.append(_Step(trace, square))

    def estimate(self) -> NoiseScale | None:
        """Return the estimate over the latest steps; None while there are fewer than 20 of them.

        The oldest steps are left out if their number does not divide by 20.
        """
        size = len(self._steps) // _NUM_BLOCKS
        if not size:
            return None
        steps = list(self._steps)[-size * _NUM_BLOCKS :]
        blocks = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
        traces = [fmean(step.trace for step in block) for block in blocks]
        squares = [fmean(step.square for step in block) for block in blocks]
        trace, square = fmean(traces), fmean(squares)
        low, high = _fieller(traces, squares)
        return NoiseScale(max(trace, 0.0) / square if square > 0 else math.inf, low, high, len(steps))


def _fieller(numerators: list[float], denominators: list[float]) -> tuple[float, float]:
    """Return the ends of the 95% interval of the ratio of two means, as far as it is not negative.

    The ratios ``r`` of the interval solve ``(x - r y)^2 <= t^2 Var(x - r y)``, where ``x`` and ``y`` are the means. It
    has no upper end if the mean of the denominators does not differ from zero significantly.

    Args:
        numerators: Independent values with the mean ``x``.
        denominators: Values that belong to these, with the mean ``y``.
    """
    x, y = fmean(numerators), fmean(denominators)
    factor = _QUANTILE**2 / (_NUM_BLOCKS * (_NUM_BLOCKS - 1))

    def excess(first: list[float], second: list[float], product: float) -> float:
        a, b = fmean(first), fmean(second)
        return product - factor * sum((p - a) * (q - b) for p, q in zip(first, second, strict=True))

    # The interval is where quadratic * r^2 - 2 * linear * r + constant <= 0.
    quadratic = excess(denominators, denominators, y * y)
    linear = excess(numerators, denominators, x * y)
    constant = excess(numerators, numerators, x * x)
    discriminant = linear**2 - quadratic * constant
    if quadratic > 0:
        root = math.sqrt(max(discriminant, 0.0))
        return max((linear - root) / quadratic, 0.0), max((linear + root) / quadratic, 0.0)
    if quadratic == 0 or y <= 0 or discriminant < 0 or constant <= 0:
        return 0.0, math.inf
    # The ratios between a negative and a positive root are excluded.
    return max((linear - math.sqrt(discriminant)) / quadratic, 0.0), math.inf
