"""Make a resumed run bitwise equal to one that was never interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint import CheckpointError
from lightning_dist.model.randomness import rng_state, set_rng_state
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.plugins import _compat
from lightning_dist.plugins._compat import progress
from lightning_dist.plugins.strategies.data_position import NUM_SEEN, LoaderPosition, give_own_generator, make_resumable

__all__ = ["MODELS", "ExactResume"]

MODELS = ("current_model_state", "state_dict")
"""Keys under which a checkpoint may hold the trained weights.

WeightAveraging stores its average under the second key and then stores the trained weights under the first."""


class ExactResume:
    """Save and restore state that differs between ranks: random generators, positions in the data, and buffers.

    Lightning saves only rank 0's position in the data, and no states of random generators.
    """

    def __init__(self) -> None:
        self._rng: dict[str, Any] | None = None  # This state is set in the generators when training starts.
        self._rng_before_validation: dict[str, Any] | None = None
        self._positions: list[Any] = []  # These are of loaders that do not exist yet.
        self._resumed: list[LoaderPosition] = []  # These are of loaders that exist, until training starts.
        self._by_given_size: dict[int, LoaderPosition] = {}
        """The positions of the loaders that were resumed, by the batch size that the user gave them."""
        # These are the values before the first batch of the current accumulation, of more than one batch.
        self._rng_at_start: dict[str, Any] | None = None
        self._buffers_at_start: dict[str, torch.Tensor] = {}

    def process_loader(self, loader: Any, trainer: Trainer) -> None:
        """Prepare a loader that Lightning is about to use, and resume its position if it is a training loader."""
        if trainer.training:
            own = make_resumable(loader, trainer)
            if self._positions and hasattr(loader, "load_state_dict"):
                position = self._positions.pop(0)
                # Lightning loads the position as well, but not if the checkpoint was saved at an epoch's end.
                if NUM_SEEN in position:
                    loader.load_state_dict(position)
                if own is not None:
                    self._resumed.append(own)
                    self._by_given_size[own.given_size] = own
            elif own is not None and own.given_size in self._by_given_size:  # The Trainer has reloaded its loaders.
                own.resize_like(self._by_given_size[own.given_size])
        elif trainer.state.fn == TrainerFn.FITTING:
            give_own_generator(loader)

    def watch_accumulations(self, trainer: Trainer) -> None:
        """Keep the random state and the buffers at the start of each accumulation, from which a save within resumes.

        Call this at the start of a fit, after all functions that set random states before a batch.
        """
        _compat.around_every_batch(trainer, "start of accumulation", lambda: self._before_batch(trainer))

    def _before_batch(self, trainer: Trainer) -> None:
        if trainer.accumulate_grad_batches == 1 or progress.training_progress(trainer).in_window:
            return
        self._rng_at_start = rng_state()
        # All buffers are copied, because BatchNorm's kernels change theirs without increasing the tensor's version.
        buffers = trainer.lightning_module.named_buffers()
        self._buffers_at_start = {name: buffer.detach().clone() for name, buffer in buffers if not is_remote(buffer)}

    def before_validation(self, trainer: Trainer) -> None:
        """Keep the random state, so that training can continue with it after validation has drawn random numbers."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._rng_before_validation = rng_state()

    def after_validation(self) -> None:
        """Restore the random state that training had before validation."""
        if self._rng_before_validation is not None:
            set_rng_state(self._rng_before_validation)
            self._rng_before_validation = None

    def rank_state(self, checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
        """Return this rank's own state for ``checkpoint``; empty outside of a fit.

        Also set ``checkpoint`` to the point from which a resume starts: its loops, and in a save within an accumulation
        its buffers, which are set back to those before its first batch.

        Args:
            checkpoint: The checkpoint dictionary that this rank has made, which is changed in place.
            trainer: The Trainer that saves it.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return {}
        rng = self._rng_before_validation or rng_state()
        progress.prepare_resume(trainer, checkpoint["loops"])
        if progress.training_progress(trainer).in_window:
            rng = self._rng_at_start or rng
            weights = checkpoint[next(key for key in MODELS if key in checkpoint)]
            weights.update({name: value for name, value in self._buffers_at_start.items() if name in weights})
        return {
            "rng": rng,
            "loaders": _loader_states(checkpoint),
            "buffers": {key: _buffers(checkpoint[key], trainer) for key in MODELS if key in checkpoint},
        }

    def restore(self, checkpoint: dict[str, Any], own: Mapping[str, Any], is_divided_alike: bool) -> None:
        """Put what :meth:`rank_state` returned into the ``checkpoint`` that Lightning is about to load.

        Args:
            checkpoint: The checkpoint dictionary as it was read, which is changed in place.
            own: The result of :meth:`rank_state` on this rank when the checkpoint was saved, or an empty mapping.
            is_divided_alike: Whether this run divides a batch among its ranks as the one that saved the checkpoint.

        Raises:
            CheckpointError: If the ranks have other parts of a batch, and a data loader's position can be resumed only
                on the ranks that saved it.
        """
        states = _loader_states(checkpoint)
        if is_divided_alike and own:
            states[:] = own["loaders"]
            for key, buffers in own["buffers"].items():
                checkpoint[key].update(buffers)
        elif any(NUM_SEEN not in state for state in states):
            raise CheckpointError(
                "The checkpoint was saved by another number of ranks, or by ranks with other parts of a batch, and"
                " holds for each of them the position of its own stateful data loader, which cannot be divided among"
                " other ranks. Resume on the same number of ranks and in the same layout, or use a torch DataLoader of"
                " a map-style dataset, whose position is kept for all ranks together."
            )
        self._rng = own.get("rng")
        self._positions = list(states)

    def on_train_start(self, trainer: Trainer) -> None:
        """Restore the checkpoint's random state, now that everything created at the start has drawn its numbers."""
        self._rng_before_validation = None  # A validation that failed in an earlier fit has left it.
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None
        self._positions = []
        for position in self._resumed:
            position.on_train_start()
        self._resumed = []
        progress.leave_finished_epoch(trainer)


def _buffers(state_dict: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the buffers in ``state_dict``, and the lists that metrics keep, of which each rank has its own values.

    Parameters, sharded tensors and tensors on the meta device are left out.
    """
    params = {name for name, _ in trainer.lightning_module.named_parameters(remove_duplicate=False)}
    return {
        name: value
        for name, value in state_dict.items()
        if name not in params and isinstance(value, torch.Tensor | list) and not any(map(_is_elsewhere, _listed(value)))
    }


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and is_remote(value))


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    states: list[Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return states
