"""Compare what validate, test and predict return under a strategy with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from tests.accelerator import place
from tests.gpu.check import Found
from tests.gpu.ranks import Ranks
from tests.models import build
from tests.parity.run import Case, make_strategy

__all__ = ["evaluation"]

NUM_BATCHES = 3


def evaluate(case: Case) -> tuple[dict[str, float], list[list[Any]], int]:
    """Evaluate a model without training it.

    Returns:
        The logged metrics of a validation and a test, the predictions by batch, and the number of ranks that have
        different parts of a batch.
    """
    torch.manual_seed(0)
    model = build(case.model)
    trainer = pl.Trainer(
        **place(in_one_process=case.layout == "auto"),
        strategy=make_strategy(case),
        precision=case.precision,
        use_distributed_sampler=False,
        limit_val_batches=NUM_BATCHES,
        limit_test_batches=NUM_BATCHES,
        limit_predict_batches=NUM_BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    metrics = dict(trainer.validate(model, verbose=False)[0]) | dict(trainer.test(model, verbose=False)[0])
    predictions = [batch.tolist() for batch in trainer.predict(model) or []]
    sampler = getattr(trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1}
    return metrics, predictions, sampler["num_replicas"]


def evaluation(ranks: Ranks, num_ranks: int, case: Case) -> Found:
    """Evaluate on ranks and in one process, and compare all metrics and the predictions of the first rank."""
    expected, all_predictions, _ = ranks.run(evaluate, 1, replace(case, layout="auto", options=()))[0]
    found = ranks.run(evaluate, num_ranks, case)
    details, worst = [], 0.0
    for rank, (metrics, _, _) in enumerate(found):
        for name, value in expected.items():
            error = abs(metrics.get(name, float("nan")) - value) / abs(value)
            worst = max(worst, error)
            if not error <= 1e-10:
                details.append(f"rank {rank}: {name} is {metrics.get(name)}, expected {value}")
    _, predictions, num_parts = found[0]
    if predictions != [batch[::num_parts] for batch in all_predictions]:
        details.append("the predictions of rank 0 differ from those of its part of the batches")
    return Found(f"largest relative error of a metric {worst:.0e}", not details, tuple(details))
