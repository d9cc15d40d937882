"""Define a strategy that saves and loads sharded checkpoints, and resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.checkpoint import TECHNIQUES, CheckpointError, LoadedCheckpoint
from lightning_dist.checkpoint.state import OwnStates
from lightning_dist.mesh.consensus import (
    OtherRankError,
    raise_on_all_ranks,
    timed_barrier,
    timed_barrier_unless_missed,
)
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks.fault_tolerance import shown_path
from lightning_dist.plugins.precision import MeshPrecision
from lightning_dist.plugins.strategies import loading
from lightning_dist.plugins.strategies.bookkeeping import absolute
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions, Checkpoints, optimizer_state
from lightning_dist.plugins.strategies.exact_resume import MODELS, ExactResume
from lightning_dist.plugins.strategies.shared_batches import SharedBatchStrategy
from lightning_dist.plugins.strategies.tuning import is_of_tuning
from lightning_dist.run.after_error import announce_error

__all__ = ["AFTER_ERROR_S", "CheckpointedStrategy"]

AFTER_ERROR_S = 30.0
"""Seconds for which a rank that saves or goes on after an error waits for the others, which may wait elsewhere."""


class CheckpointedStrategy(SharedBatchStrategy):
    """Save checkpoints to which every rank writes its part, and load them into any layout.

    Args:
        checkpoint: Options for saving and loading checkpoints; None: the defaults.
        process_group_backend: The backend of ``torch.distributed``; None: the default for the device.
        timeout: The time for which ranks wait for each other in a collective or within a save; None: torch's default.
        kwargs: Keyword arguments of :class:`~lightning_dist.plugins.strategies.shared_batches.SharedBatchStrategy`.
    """

    def __init__(
        self,
        checkpoint: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **kwargs: Any,
    ) -> None:
        super().__init__(process_group_backend, timeout, **kwargs)
        self._checkpoint_options = checkpoint or CheckpointOptions()
        self._checkpoints = Checkpoints(self._checkpoint_options, timeout)
        self._exact_resume = ExactResume()
        self._restore: Callable[[], None] | None = None
        self.resumes_from: Any = None  # This is the path of the checkpoint that the coming fit resumes, or None.
        self._has_averages = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Return the plugin that removes checkpoints; the strategy writes them itself, as every rank holds a part."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if type(io) is not TorchCheckpointIO:
            raise MisconfigurationException(
                f"{type(self).__name__} writes sharded checkpoints itself and would never call {type(io).__name__}."
                " Remove it from Trainer(plugins=...)."
            )
        self.set_checkpoint_io(io)

    def restore_when_sharded(self, restore: Callable[[], None]) -> None:
        """Postpone what Lightning restores before :meth:`setup` until the module is sharded, within :meth:`setup`.

        Weights are then loaded into shards. ``configure_optimizers`` and ``on_fit_start`` run after it, and find the
        states of callbacks and what the module's ``on_load_checkpoint`` has set, as under any strategy that restores
        before ``setup``.

        Args:
            restore: Function that loads the weights, the data module and the callbacks from the checkpoint that was
                asked for.
        """
        self._restore = restore

    def _restore_now(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let a training loader save and resume its position, and seed workers by this rank's part of the data."""
        dataloader = super().process_dataloader(dataloader)
        self._exact_resume.process_loader(dataloader, self._trainer)
        return dataloader

    @override
    def on_train_start(self) -> None:
        """Restore the random state of the run that is resumed."""
        self._exact_resume.on_train_start(self._trainer)
        super().on_train_start()
        self._exact_resume.watch_accumulations(self._trainer)
        if self.parallel.lets_replicas_differ:
            _compat.before_validation(self._trainer, self._synchronize_replicas)

    @override
    def on_train_end(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: If it could not be written.
        """
        super().on_train_end()
        self._checkpoints.finish()
        self.parallel.synchronize_replicas()

    @override
    def on_validation_start(self) -> None:
        """Save the random state of training until validation ends, and give every rank the same buffers."""
        self._exact_resume.before_validation(self._trainer)
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        """Restore the random state that training had before validation."""
        super().on_validation_end()
        self._exact_resume.after_validation()

    @override
    def _begin_evaluation(self, agrees_on_buffers: bool = True) -> None:
        if agrees_on_buffers:
            self._checkpoints.before_update()  # Callbacks may swap weights for the evaluation.
        super()._begin_evaluation(agrees_on_buffers)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict. Sharded parameters are DTensors; those of other stages are meta tensors."""
        assert self.lightning_module is not None
        if self._parallel is None:
            return self.lightning_module.state_dict()
        with self.parallel.without_hook_views():
            self._checkpoints.before_update()  # Hooks for this checkpoint may change weights that another one copies.
            self.parallel.stop_staying_gathered()
            self.parallel.free()
            if self.parallel.lets_replicas_differ:
                self._wait_to_save()
                self._synchronize_replicas()
            return self.lightning_module.state_dict()

    def _synchronize_replicas(self) -> None:
        """Give all replicas the same weights. This is a collective if their weights may differ now."""
        self._checkpoints.before_update()
        self.parallel.synchronize_replicas()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by the parameters' full names.

        Sharded states are DTensors; the states of parameters that only other ranks have are on the meta device. This is
        a collective if ranks have different parameters.
        """
        assert self.lightning_module is not None
        with self.parallel.without_hook_views():
            state = optimizer_state(optimizer, self.lightning_module)
            if not state:
                return state
            if self.parallel.states.has_remote_parameters or self._own_states(optimizer) is not None:
                self._wait_to_save()
            return self._with_states_of_owners(optimizer, self.parallel.states.whole_optimizer_state(state))

    def _with_states_of_owners(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with the states of parameters that only their owners have."""
        return state

    def _own_states(self, optimizer: Optimizer) -> OwnStates | None:
        """Return a function that returns which states of an optimizer this rank keeps; None: its shards of all."""
        return None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint as a directory to which every rank writes its part; in a fit, in the background."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__}.save_checkpoint takes no storage_options: it uses no CheckpointIO.")
        with self.parallel.without_hook_views():
            self._wait_to_save()
            # Names that contain the time, and relative names, may differ between ranks.
            path = self.broadcast(absolute(filepath))
            self._checkpoints.save(checkpoint, partial(self._rank_state, checkpoint), path, self._settings_to_save())
            # Callbacks that average weights change them before the next step, which the strategy does not notice.
            if self._has_averages:
                self._checkpoints.before_update()

    def _settings_to_save(self) -> dict[str, Any]:
        """Return what a checkpoint says about how the run trains, as plain JSON."""
        return {}

    def _wait_to_save(self) -> None:
        """Wait until all ranks save, because each has a part of the checkpoint.

        Raises:
            OtherRankError: If not all ranks save.
        """
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:
            timed_barrier_unless_missed("trainer.save_checkpoint")
            return
        try:  # A callback saves after an error, which may have occurred on this rank alone.
            timed_barrier("Saving a checkpoint after an error", AFTER_ERROR_S)
        except OtherRankError as error:
            announce_error(error)  # Lightning is in on_exception already, and does not call it for this error.
            raise

    def _rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's own state for ``checkpoint``, and change ``checkpoint`` so that it can be written."""
        own = self._exact_resume.rank_state(checkpoint, self._trainer)
        if "optimizer_states" in checkpoint:
            checkpoint[TECHNIQUES] = self.parallel.states.of_techniques()
        if own:
            own["parts_of_batch"] = self._parts_of_batch
        for key in checkpoint.keys() & set(MODELS):
            checkpoint[key] = self.parallel.states.state_to_write(checkpoint[key])
        apart = (*MODELS, "optimizer_states", TECHNIQUES)
        others = {key: value for key, value in checkpoint.items() if key not in apart}
        checkpoint |= self.parallel.states.hook_state_to_write(others)
        return own

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Announce to the other ranks that the run has failed on this rank, so that they do not wait for it.

        After Ctrl-C, rank 0 says what was saved.
        """
        announce_error(exception)
        if isinstance(exception, KeyboardInterrupt):
            self._checkpoints.wait()
            rank_zero_info(f"Stopped by Ctrl-C, with exit code 1: the run is not done. {self.what_was_saved()}")

    @override
    def what_was_saved(self) -> str:
        """Return a sentence on the newest checkpoint of a fit and on how to resume it; the sentence has no line breaks.

        It is empty outside of a fit. This is no collective.
        """
        if self._trainer.state.fn != TrainerFn.FITTING:
            return ""
        try:
            newest = self._checkpoints.newest()
        except (CheckpointError, ValueError, OSError) as error:
            return f"The checkpoints of the run cannot be listed: {error}"
        if newest is None:
            return (
                "The run has saved no checkpoint to resume from; ModelCheckpoint(every_n_train_steps=...) saves some."
            )
        path, manifest = shown_path(newest[0]), newest[1]
        step = manifest.about.get("global_step")
        return f"The newest checkpoint is {path}, saved after step {step}: ckpt_path={path!r} resumes from there."

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes, but not after a save, which begins on all ranks and ends for all or for none."""
        if name != "Trainer.save_checkpoint":
            super().barrier(name)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint after the saves that are under way have ended, unless the last of them has failed."""
        self._checkpoints.remove(self.broadcast(absolute(filepath)) if is_of_tuning(filepath) else absolute(filepath))

    def wait_for_checkpoints(self) -> None:
        """Wait until all requested checkpoints are written, so that they can be read or copied.

        Raises:
            CheckpointError: If the newest checkpoint could not be written.
        """
        self._checkpoints.finish()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint (a directory of any layout or a single file) into tensors that are sharded as this run's.

        Weights that only other ranks have are on the meta device.
        """
        assert self.lightning_module is not None
        self._checkpoints.finish_pending()
        options, path = self._checkpoint_options, self.broadcast(absolute(checkpoint_path))
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if weights_only is None:
            weights_only = options.weights_only and not self._checkpoints.is_own(path)
        go_on_from = partial(self._go_on_from, path) if is_fitting else None
        states = None if self._parallel is None else self.parallel.states
        checkpoint = loading.load(
            path, self.lightning_module, is_fitting, states, weights_only, options.verify, go_on_from
        )
        if self._parallel is not None:
            for key in checkpoint.keys() & set(MODELS):
                self.parallel.states.add_remote_state(checkpoint[key])
        return checkpoint

    def _go_on_from(self, path: str, part: LoadedCheckpoint) -> None:
        has_as_many_ranks = part.manifest.world_size == self.world_size
        own = part.rank_state
        # Ranks with the same part of a batch must have the same buffers, and the same position in the data.
        is_divided_alike = has_as_many_ranks and own.get("parts_of_batch", self._parts_of_batch) == self._parts_of_batch
        self._exact_resume.restore(part.state, own, is_divided_alike)
        states = part.state.pop(TECHNIQUES, {})
        if self._parallel is not None:
            self.parallel.states.load_techniques(states)
        self._checkpoints.go_on_from(path, part.manifest)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint that :meth:`load_checkpoint` read."""
        assert self.lightning_module is not None
        with raise_on_all_ranks("loading the weights"):  # They may fail to fit on only one stage of a pipeline.
            loading.load_weights(checkpoint, self.lightning_module, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states of a checkpoint that :meth:`load_checkpoint` read."""
        assert self.lightning_module is not None
        with raise_on_all_ranks("loading the optimizers' states"):
            plugin = self.precision_plugin
            # Moments of parameters with master weights are wider than the parameters.
            keeps_dtypes = isinstance(plugin, MeshPrecision) and plugin.master_weights is not None
            own_states = self._own_states
            loading.load_optimizers(checkpoint, self.optimizers, self.lightning_module, keeps_dtypes, own_states)
