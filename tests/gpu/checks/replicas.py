"""Check replicas that send compressed gradients, or that train on their own for some steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_dist.techniques.compression import BF16, FP8, FP16, Compressor, DiLoCo, Int8, LocalSGD, PowerSGD, TopK
from tests.gpu.check import Found
from tests.gpu.checks.parity import worst_error
from tests.gpu.ranks import Ranks
from tests.parity.run import Case, Outcome, reference, run

__all__ = ["COMPRESSORS", "SYNC_METHODS", "compression", "local_training"]

COMPRESSORS: dict[str, tuple[Compressor, float]] = {
    "bf16": (BF16(), 1e-2),
    "fp16": (FP16(), 1e-3),
    "fp8": (FP8(block_size=64, min_numel=64), 0.1),
    "int8": (Int8(block_size=64, min_numel=64), 0.05),
    "powersgd": (PowerSGD(rank=2, min_numel=64, min_compression_rate=1.0), 1.0),
    "topk": (TopK(ratio=0.05, block_size=100, min_numel=64), 1.0),
}
"""Compressors of small parameters, and the largest accepted errors of the first gradient, relative to its norm.

What is missing of a gradient is sent in later steps.
"""

SYNC_METHODS = {
    "local_sgd": LocalSGD(1),
    "local_sgd-after-start": LocalSGD(5, start_step=5),
    "diloco": DiLoCo(1, outer_lr=1.0, outer_momentum=0.0),
}
"""Ways of training replicas on their own that equal the averaging of gradients, for SGD without momentum."""


def compression(ranks: Ranks, num_ranks: int, layout: str, name: str) -> Found:
    """Compare the first compressed gradient with that of one process, and the weights of all ranks."""
    case = Case(layout, "gpt", 1, None, precision="32-true", num_steps=6)
    compressor, bound = COMPRESSORS[name]
    expected = ranks.run(reference, 1, case, num_ranks)[0].gradients[0]
    outcomes: list[Outcome] = ranks.run(run, num_ranks, replace(case, options=(("compression", compressor),)))
    found = outcomes[0].gradients[0]
    error = sum(float(np.square(found[key] - value).sum()) for key, value in expected.items()) ** 0.5
    error /= sum(float(np.square(value).sum()) for value in expected.values()) ** 0.5
    differing = [
        key
        for other in outcomes[1:]
        for key, weight in other.weights.items()
        if not np.array_equal(weight, outcomes[0].weights[key])
    ]
    is_finite = all(np.isfinite(weight).all() for weight in outcomes[0].weights.values())
    details = tuple(f"ranks differ in {key}" for key in differing)
    is_met = error <= bound and is_finite and not differing
    return Found(f"the first gradient has a relative error of {error:.1e}", is_met, details)


def local_training(ranks: Ranks, num_ranks: int, layout: str, name: str) -> Found:
    """Compare the weights of replicas that are synchronized by ``SYNC_METHODS[name]`` with those of one process."""
    case = Case(layout, "gpt", 1, None, optimizer="plain_sgd", num_steps=5)
    expected = ranks.run(reference, 1, case, num_ranks)[0].weights
    outcomes = ranks.run(run, num_ranks, replace(case, options=(("sync", SYNC_METHODS[name]),)))
    error, where = max(worst_error(outcome.weights, expected) for outcome in outcomes)
    return Found(f"largest relative error of a weight {error:.0e} ({where})", error <= 1e-10)
