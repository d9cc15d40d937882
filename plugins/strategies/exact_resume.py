"""What makes the run after a resume the same as one that was never interrupted, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint import CheckpointError
from lightning_dist.plugins import _compat, _progress
from lightning_dist.plugins.strategies.data_position import NUM_SEEN, make_resumable, with_its_own_seeds
from lightning_dist.randomness import rng_state, set_rng_state

__all__ = ["MODELS", "ExactResume"]

MODELS = ("current_model_state", "state_dict")
"""Where a checkpoint has the weights that are trained: the first, where WeightAveraging has put its average in the
second."""


class ExactResume:
    """What each rank alone has: its random numbers, its place in the data, its buffers.

    Lightning saves rank 0's place in the data only, and no random numbers.
    """

    def __init__(self) -> None:
        self._rng: dict[str, Any] | None = None  # to be set when training starts
        self._rng_before_validation: dict[str, Any] | None = None
        self._positions: list[Any] = []  # of the loaders to come
        # As of the last optimizer step, where more than one batch is accumulated for a step:
        self._rng_at_update: dict[str, Any] | None = None
        self._buffers_at_update: dict[str, torch.Tensor] = {}

    def process_loader(self, loader: Any, trainer: Trainer) -> None:
        """Prepare a loader that Lightning is about to use."""
        if trainer.training:
            make_resumable(loader, trainer)
            if self._positions and hasattr(loader, "load_state_dict"):
                position = self._positions.pop(0)
                # Lightning loads it too, but not where the checkpoint was saved at an epoch's end.
                if NUM_SEEN in position:
                    loader.load_state_dict(position)
        elif trainer.state.fn == TrainerFn.FITTING:
            with_its_own_seeds(loader)

    def after_update(self, trainer: Trainer) -> None:
        """Keep what the next batches change, if a save among them has to go back to here."""
        if trainer.accumulate_grad_batches == 1 and not _compat.changes_accumulation(trainer):
            return
        self._rng_at_update = rng_state()
        # All of them: BatchNorm's kernels change theirs without counting up the tensor's version.
        buffers = trainer.lightning_module.named_buffers()
        self._buffers_at_update = {name: buffer.detach().clone() for name, buffer in buffers if not buffer.is_meta}

    def before_validation(self, trainer: Trainer) -> None:
        """Keep the random numbers for training: it goes on the same, whatever validation draws."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._rng_before_validation = rng_state()

    def after_validation(self) -> None:
        """Go on with the random numbers of training."""
        if self._rng_before_validation is not None:
            set_rng_state(self._rng_before_validation)
            self._rng_before_validation = None

    def rank_state(self, checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
        """This rank's own, of the ``checkpoint`` dictionary that it has made, and which is set to what is resumed."""
        if trainer.state.fn != TrainerFn.FITTING:
            return {}
        rng = self._rng_before_validation or rng_state()
        _progress.prepare_resume(trainer, checkpoint["loops"])
        if _progress.training_progress(trainer).in_window:
            rng = self._rng_at_update or rng
            weights = checkpoint[next(key for key in MODELS if key in checkpoint)]
            weights.update({name: value for name, value in self._buffers_at_update.items() if name in weights})
        return {
            "rng": rng,
            "loaders": _loader_states(checkpoint),
            "buffers": {key: _buffers(checkpoint[key]) for key in MODELS if key in checkpoint},
        }

    def restore(self, checkpoint: dict[str, Any], own: Mapping[str, Any], has_as_many_ranks: bool) -> None:
        """Put what :meth:`rank_state` returned into the ``checkpoint`` that Lightning is about to load.

        Args:
            checkpoint: As it was read.
            own: This rank's, or empty.
            has_as_many_ranks: As the run that saved it.

        Raises:
            CheckpointError: If it is in the middle of the data of a loader whose place only as many ranks can take.
        """
        states = _loader_states(checkpoint)
        if has_as_many_ranks and own:
            states[:] = own["loaders"]
            for key, buffers in own["buffers"].items():
                checkpoint[key].update(buffers)
        elif any(NUM_SEEN not in state for state in states):
            raise CheckpointError(
                "The checkpoint was saved by another number of ranks, each with the place of its own stateful data"
                " loader, which cannot be split otherwise. Resume on as many ranks, or use a torch DataLoader of a"
                " dataset with indices: its place is kept for all ranks together."
            )
        self._rng = own.get("rng")
        self._positions = list(states)

    def on_train_start(self, trainer: Trainer) -> None:
        """Go on with the random numbers of the checkpoint, now that all that is made at a start has drawn its own."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None
        self._positions = []
        self.after_update(trainer)
        _progress.leave_finished_epoch(trainer)


def _buffers(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in state_dict.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta
    }


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    states: list[Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return states
