"""The estimate of the gradient noise scale is right on problems whose scale is known, and so is its interval."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.plugins.callbacks import GradientNoiseScale
from lightning_dist.run.telemetry import NoiseScale, NoiseScaleEstimator

NUM_RANKS, SAMPLES = 4, 8
DIM = 50
CURVATURES = torch.linspace(0.1, 2.0, DIM, dtype=torch.float64)
VARIANCES = torch.linspace(1.0, 3.0, DIM, dtype=torch.float64)
DISTANCE = torch.full((DIM,), 0.25, dtype=torch.float64)
# The loss of a sample x is (w - x)^T A (w - x) / 2 with diagonal A, so that its gradient is A (w - x).
GRADIENT = CURVATURES * DISTANCE
COVARIANCE = CURVATURES**2 * VARIANCES
TRUTH = float(COVARIANCE.sum() / GRADIENT.square().sum())


def estimate(seed: int, num_steps: int, gradient: torch.Tensor = GRADIENT) -> NoiseScale:
    """Estimate the noise scale from ``num_steps`` steps of a quadratic problem, at fixed weights."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_steps, NUM_RANKS, DIM, dtype=torch.float64, generator=generator)
    ranks = gradient + noise * (COVARIANCE / SAMPLES).sqrt()
    of_rank, of_mean = ranks.square().sum(-1).mean(-1), ranks.mean(1).square().sum(-1)
    estimator = NoiseScaleEstimator(num_steps)
    for pair in zip(of_rank.tolist(), of_mean.tolist(), strict=True):
        estimator.add(*pair, SAMPLES, NUM_RANKS)
    found = estimator.estimate()
    assert found is not None
    return found


def test_the_estimate_of_a_quadratic_problem_is_within_two_percent() -> None:
    assert pytest.approx(39.823, abs=0.001) == TRUTH
    found = estimate(0, 4000)
    assert found.scale == pytest.approx(TRUTH, rel=0.02)
    assert found.low < TRUTH < found.high
    assert found.high / found.low < 1.1
    assert found.num_steps == 4000


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    found = [estimate(seed, 200) for seed in range(100)]
    covered = sum(low <= TRUTH <= high for _, low, high, _ in found)
    assert 90 <= covered <= 99
    assert 0.02 < sum(high - low for _, low, high, _ in found) / (100 * TRUTH) < 0.4


def test_a_gradient_that_cannot_be_told_from_its_noise_gives_a_lower_bound() -> None:
    found = [estimate(seed, 40, torch.zeros(DIM, dtype=torch.float64)) for seed in range(20)]
    assert sum(math.isinf(high) for _, _, high, _ in found) >= 18
    weak = [estimate(seed, 40, 0.05 * GRADIENT) for seed in range(20)]
    truth = TRUTH / 0.05**2
    assert sum(low <= truth <= high for _, low, high, _ in weak) >= 18
    assert any(low > 0 and math.isinf(high) for _, low, high, _ in weak)


def test_gradients_without_noise_have_the_scale_zero() -> None:
    estimator = NoiseScaleEstimator(20)
    for _ in range(20):
        estimator.add(4.0, 4.0, 8, 2)
    assert estimator.estimate() == (0.0, 0.0, 0.0, 20)


def test_only_the_latest_steps_count_and_steps_may_have_different_sizes() -> None:
    estimator = NoiseScaleEstimator(45)
    assert estimator.estimate() is None
    for step in range(100):
        # Before step 55, the noise is four times as large; |G|^2 is 2.
        trace, samples, num_ranks = (4.0 if step < 55 else 1.0), 2 + step % 3, 2 + step % 2
        estimator.add(2 + trace / samples, 2 + trace / (samples * num_ranks), samples, num_ranks)
    found = estimator.estimate()
    assert found is not None
    assert found.scale == pytest.approx(0.5, rel=1e-12)
    assert found.num_steps == 40  # The oldest five do not fill 20 blocks.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"window": 19}, "GradientNoiseScale: window=19 must be at least 20 steps"),
        ({"log_every_n_steps": 0}, "GradientNoiseScale(log_every_n_steps=0): expected a positive number"),
    ],
)
def test_numbers_that_are_too_small_are_refused(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        GradientNoiseScale(**arguments)
    assert text in str(caught.value)
