"""Refuse checks in which there is nothing to compare, or in which a difference would mean nothing."""

from __future__ import annotations

from inspect import signature

from lightning.pytorch import LightningModule, Trainer

from lightning_dist.plugins.parity_check.reference import batch_norms
from lightning_dist.plugins.strategies import MeshStrategy

__all__ = ["comparable_strategy", "refuse_batch_norm", "refuse_what_differs_by_design", "uses_whole_batch"]


def comparable_strategy(trainer: Trainer) -> MeshStrategy:
    """Return the strategy of ``trainer``.

    Raises:
        ValueError: If it is not one of this package, runs in one process, or lets replicas compute other gradients than
            one process by design.
    """
    strategy = trainer.strategy
    name = strategy.strategy_name if isinstance(strategy, MeshStrategy) else type(strategy).__name__
    if trainer.world_size == 1:
        raise ValueError(
            f"strategy={name} runs in one process, so that there is nothing to compare: name a strategy such as"
            " hybrid_shard, and set devices or num_nodes of the Trainer to more than 1."
        )
    if not isinstance(strategy, MeshStrategy):
        raise ValueError(
            f"strategy={name} is not a strategy of lightning-dist, and cannot be checked: name one, such as"
            " hybrid_shard."
        )
    for options in strategy.config.arguments.options:
        options.check_comparison()
    return strategy


def uses_whole_batch(module: LightningModule, trainer: Trainer, asked: bool | None) -> bool:
    """Return whether one process computes the batches of all data-parallel ranks as one batch.

    Args:
        module: The module that is checked.
        trainer: The Trainer of the run under the strategy.
        asked: The user's choice; None: the default.

    Raises:
        ValueError: If the user's choice is not possible.
    """
    strategy = comparable_strategy(trainer)
    if strategy.layout.num_data_parallel == 1:
        return False
    if module.automatic_optimization:
        return strategy.layer_sync is not None if asked is None else asked
    if asked is False:
        raise ValueError(
            f"whole_batch=False with {type(module).__name__}, which sets automatic_optimization = False: one process"
            " cannot accumulate gradients over the batches of the ranks, because the step runs the optimizers itself."
        )
    return True


def refuse_what_differs_by_design(module: LightningModule) -> None:
    """Refuse a module whose batches cannot be recorded.

    Raises:
        ValueError: If ``training_step`` takes ``dataloader_iter``.
    """
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise ValueError(
            f"{type(module).__name__}.training_step takes dataloader_iter, so that its batches cannot be recorded for"
            " one process: let it take the batch."
        )


def refuse_batch_norm(module: LightningModule) -> None:
    """Refuse normalisation over the samples of a rank, if one process computes the batches of all ranks as one.

    Raises:
        ValueError: If a module is a BatchNorm that is not synchronized.
    """
    for name, part in batch_norms(module):
        raise ValueError(
            f"{name} is a {type(part).__name__}, which normalises the samples of each rank by themselves, and one"
            " process computes the batches of all ranks as one batch (whole_batch, or manual optimization). Check the"
            " module with a single data-parallel rank, such as under tensor_parallel."
        )
