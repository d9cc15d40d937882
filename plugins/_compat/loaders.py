"""Read and change the data loaders of a Trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import BatchSampler, DataLoader

from lightning_dist.plugins._compat.loops import loop_of_evaluation

__all__ = [
    "FINGERPRINT",
    "are_sequential",
    "choose_training_samplers",
    "given_train_loader",
    "make_dataloader",
    "mode_of_loaders",
    "num_evaluation_batches",
    "seed_workers_by",
    "silence_predictions",
    "training_loaders",
    "transferred",
    "validates_alike",
]


FINGERPRINT = "_fingerprint"
"""Name of the attribute of Hugging Face's datasets that holds a digest of their data.

This could be replaced by a public property of them.
"""


def mode_of_loaders(trainer: Trainer) -> str | None:
    """Return how the training loaders of a fit are combined, such as ``"max_size_cycle"``; None if there are none yet.

    This could be replaced by a public property of the ``CombinedLoader``.
    """
    loaders = trainer.fit_loop._combined_loader
    return None if loaders is None else loaders._mode


def training_loaders(trainer: Trainer) -> list[Any]:
    """Return the training loaders of a fit, as Lightning uses them; none if they have not been made yet.

    This could be replaced by a public property of the ``CombinedLoader``.
    """
    loaders = trainer.fit_loop._combined_loader
    return [] if loaders is None else list(loaders.flattened)


def _known_batches(max_batches: list[int | float], loaders: CombinedLoader | None) -> list[float]:
    """Return the numbers of batches, or infinity for loaders of unknown length, which may have fewer than the limit."""
    flattened = [] if loaders is None else loaders.flattened
    if len(flattened) != len(max_batches):
        return [float(number) for number in max_batches]
    found = []
    for number, loader in zip(max_batches, flattened, strict=True):
        length = sized_len(loader)
        if length is None:
            found.append(math.inf if number else 0.0)
        else:  # The number is infinite if this rank has no batch, and others have some.
            found.append(float(min(number, length)))
    return found


def validates_alike(trainer: Trainer) -> bool:
    """Return whether all ranks have the same, known numbers of validation batches.

    This is a collective over all processes.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    batches = _known_batches(loop.max_batches, loop._combined_loader)
    extremes = torch.tensor([*batches, *(-number for number in batches)], device=trainer.strategy.root_device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return bool((extremes[: len(batches)] == -extremes[len(batches) :]).all()) and all(map(math.isfinite, batches))


def num_evaluation_batches(trainer: Trainer) -> list[int | float]:
    """Return this rank's number of batches of each loader in the evaluation or prediction that begins.

    It is infinite for a loader whose length is unknown. This could be replaced by public properties of the Trainer for
    all of its loops.
    """
    loop = loop_of_evaluation(trainer)
    return list(_known_batches(loop.max_batches, loop._combined_loader))


def given_train_loader(trainer: Trainer) -> Any:
    """Return the training loaders that ``trainer.fit`` was given; None: they are those of the module.

    This could be replaced by a public property of the loop.
    """
    given = trainer.fit_loop._data_source.instance
    return None if isinstance(given, LightningModule) else given


def make_dataloader(trainer: Trainer) -> Any:
    """Return the loaders that the user's hook or argument gives for the run that begins.

    Their samplers are not replaced yet. Lightning gets the same loaders later, so that the hook is called only once,
    unless a checkpoint is loaded in between, which may change the result of the hook. This could be replaced by a
    public property of the loops.
    """
    loops: dict[TrainerFn, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert trainer.state.fn is not None
    source = loops[trainer.state.fn]._data_source
    own = source.dataloader
    # Lightning records the arguments of samplers and loaders here, because it may make them again later.
    loaders = _request_dataloader(source)

    def made_before() -> Any:
        vars(source)["dataloader"] = own
        return loaders if trainer.ckpt_path is None else own()

    vars(source)["dataloader"] = made_before
    return loaders


def transferred(trainer: Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Return ``batch`` as Lightning passes it to a step: converted, on the device, and after the hooks for batches.

    This could be replaced by a public function of the loops.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    is_of_datamodule = datamodule is not None and is_overridden("on_before_batch_transfer", datamodule)
    hooks = datamodule if is_of_datamodule else trainer.lightning_module
    batch = hooks.on_before_batch_transfer(batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, trainer.strategy.root_device, dataloader_idx)


def are_sequential(loaders: Any) -> bool:
    """Return whether an evaluation runs over ``loaders`` one after another, which is the default.

    This could be replaced by a public property of the ``CombinedLoader``.
    """
    return not isinstance(loaders, CombinedLoader) or loaders._mode == "sequential"


def choose_training_samplers(trainer: Trainer, choose: Callable[[Any, Any], Any]) -> None:
    """Let ``choose`` make the sampler of each training loader that Lightning would give a distributed one.

    Lightning shuffles training loaders whatever sampler they have. This could be replaced by a hook of strategies.

    Args:
        trainer: The Trainer of a fit, whose training loaders have not been made yet.
        choose: Function that is given the sampler of the user's loader and its dataset, and returns the sampler of this
            rank; None: Lightning chooses it.
    """
    connector = trainer._data_connector

    def resolve(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        sampler = None
        if mode == RunningStage.TRAINING and connector._requires_distributed_sampler(dataloader):
            batches = dataloader.batch_sampler
            # A batch sampler of the user's own has the sampler whose order counts; that of the loader is torch's.
            own = dataloader.sampler if type(batches) is BatchSampler else getattr(batches, "sampler", None)
            sampler = choose(dataloader.sampler if own is None else own, dataloader.dataset)
        return type(connector)._resolve_sampler(connector, dataloader, shuffle, mode) if sampler is None else sampler

    vars(connector)["_resolve_sampler"] = resolve


def seed_workers_by(loader: object, rank: int) -> None:
    """Seed the workers of ``loader`` by ``rank`` if Lightning would seed them by the global rank.

    This could be replaced by a hook that gives Lightning this rank.
    """
    if isinstance(loader, DataLoader) and int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def silence_predictions(trainer: Trainer) -> list[Callback]:
    """Keep this rank from returning and writing predictions, and return the callbacks that were removed for that."""
    trainer.predict_loop.return_predictions = False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    writers: list[Callback] = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    callbacks[:] = [callback for callback in callbacks if callback not in writers]
    return writers
