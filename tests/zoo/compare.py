"""Compare a family under a strategy with one process, which gives one cell of the table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lightning_dist.run.parity import ParityError, errors
from tests.pool import RankFailed, WorkerPool
from tests.zoo.family import Family
from tests.zoo.run import REFUSED, WORLD_SIZES, Outcome, run

__all__ = ["TOLERANCE", "Cell", "compare", "failed"]

TOLERANCE = 1e-8
TIMEOUT_S, GRACE_S = 300.0, 60.0


@dataclass(frozen=True)
class Cell:
    """Describe the outcome of a comparison.

    Args:
        status: ``equal``, ``refused``, ``WRONG``, ``CRASHED`` or ``HUNG``.
        text: First sentence of a refusal, or description of a failure.
        error: Largest relative error of all compared values.
        split: Fraction of the parameters that is split over ``tp``.
        details: Tracebacks, or all values that are wrong.
    """

    status: str
    text: str = ""
    error: float = 0.0
    split: float = 0.0
    details: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.text}" if self.text else self.status

    @property
    def is_failure(self) -> bool:
        """Return whether this is a defect."""
        return self.status not in ("equal", "refused")


def compare(pool: WorkerPool, family: Family, strategy: str, expected: Outcome) -> Cell:
    """Run a family under a strategy, and compare it with one process.

    Args:
        pool: Workers that run the family.
        family: Family to run.
        strategy: Name of the strategy.
        expected: Outcome of the run in one process.
    """
    try:
        outcomes = pool.run(run, WORLD_SIZES[strategy], family.name, strategy, timeout_s=TIMEOUT_S, grace_s=GRACE_S)
    except RankFailed as error:
        return failed(error, WORLD_SIZES[strategy])
    losses = np.mean([outcome.losses for outcome in outcomes], axis=0)
    found = _errors({"loss": losses}, {"loss": np.array(expected.losses)})
    found |= {f"gradient of {key}": error for key, error in _errors(outcomes[0].gradients, expected.gradients).items()}
    found |= _errors(outcomes[0].weights, expected.weights)
    worst = max(found, key=found.__getitem__)
    if found[worst] <= TOLERANCE:
        return Cell("equal", "", found[worst], outcomes[0].split)
    wrong = [f"{key}: {error:.1e}" for key, error in found.items() if error > TOLERANCE]
    text = f"{len(wrong)} of {len(found)} are off, {worst} by {found[worst]:.1e}"
    return Cell("WRONG", text, found[worst], outcomes[0].split, "\n".join(wrong))


def _errors(candidate: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return relative errors by name. A missing gradient counts as zero, since an unused parameter may have none."""
    names = dict.fromkeys([*reference, *candidate])
    like = {name: candidate.get(name, reference.get(name)) for name in names}
    tensors = [
        {name: torch.from_numpy(np.asarray(side.get(name, np.zeros_like(like[name])))) for name in names}
        for side in (candidate, reference)
    ]
    try:
        return errors(*tensors)
    except ParityError:  # The shapes differ.
        return {"shapes": math.inf}


def failed(error: RankFailed, world_size: int) -> Cell:
    """Return the cell of a run that has failed on at least one of ``world_size`` ranks."""
    texts = [_message(text) for _, text in sorted(error.errors.items())]
    details = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(error.errors.items()))
    hung = [text for text in texts if text.startswith("the rank ")]
    own = next((text for text in texts if text not in hung and "OtherRankError" not in text), texts[0])
    if hung:
        return Cell("HUNG", _first_sentence(f"{hung[0]} ({own})" if own not in hung else own), details=details)
    if len(texts) == world_size and all(text.startswith(REFUSED) for text in texts):
        return Cell("refused", _first_sentence(own.removeprefix(f"{REFUSED}: ").partition(": ")[2]), details=details)
    crashed = next((text for text in texts if not text.startswith(REFUSED)), own)
    return Cell("CRASHED", _first_sentence(crashed.partition(": ")[2]), details=details)


def _message(text: str) -> str:
    """Return the message of an error without its traceback."""
    return text.rpartition("FitError: ")[2].strip() if "FitError: " in text else text.strip().splitlines()[-1]


def _first_sentence(text: str) -> str:
    line = text.strip().splitlines()[0]
    return re.split(r"(?<=[.!?])\s", line)[0][:300]
