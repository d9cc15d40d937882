"""Save and load sharded checkpoints as a strategy, and resume exactly."""

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
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.after_error import announce_error
from lightning_dist.checkpoint import LoadedCheckpoint
from lightning_dist.consensus import (
    OtherRankError,
    raise_on_all_ranks,
    timed_barrier,
    timed_barrier_unless_missed,
)
from lightning_dist.plugins.strategies import loading
from lightning_dist.plugins.strategies.bookkeeping import absolute
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions, Checkpoints, optimizer_state
from lightning_dist.plugins.strategies.exact_resume import MODELS, ExactResume
from lightning_dist.plugins.strategies.shared_batches import SharedBatchStrategy

__all__ = ["AFTER_ERROR_S", "CheckpointedStrategy"]

AFTER_ERROR_S = 30.0
"""Seconds that a rank which saves or goes on after an error waits for the others, which may wait for it elsewhere."""


class CheckpointedStrategy(SharedBatchStrategy):
    """Save checkpoints of which every rank writes its part, and load them into any layout.

    Args:
        checkpoint: How checkpoints are saved and loaded; None: by the defaults.
        process_group_backend: The backend of ``torch.distributed``; None: what fits the device.
        timeout: How long a collective, and ranks within a save, may wait for each other.
    """

    def __init__(
        self,
        checkpoint: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        self._checkpoint_options = checkpoint or CheckpointOptions()
        self._checkpoints = Checkpoints(self._checkpoint_options, timeout)
        self._exact_resume = ExactResume()
        self._restore: Callable[[], None] | None = None
        self._has_averages = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Removes checkpoints. They are written by the strategy, since every rank holds a part."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if type(io) is not TorchCheckpointIO:
            raise MisconfigurationException(
                f"{type(self).__name__} writes sharded checkpoints itself and would never call {type(io).__name__}."
                " Remove it from Trainer(plugins=...)."
            )
        self._checkpoint_io = io

    def restore_when_sharded(self, restore: Callable[[], None]) -> None:
        """Postpone what Lightning restores before :meth:`setup` until the module is sharded, within :meth:`setup`.

        Weights are loaded into shards. Optimizers and ``on_fit_start`` come after it, and find the states of callbacks
        and what the module's ``on_load_checkpoint`` has set, as under any strategy that restores before ``setup``.

        Args:
            restore: Loads the weights, the data module and the callbacks from the checkpoint that was asked for.
        """
        self._restore = restore

    def _restore_now(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let a training loader be saved and entered where it is, and seed workers by the part of the data."""
        self._exact_resume.process_loader(dataloader, self._trainer)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        """Continue as the run did that was resumed."""
        self._exact_resume.on_train_start(self._trainer)
        super().on_train_start()

    @override
    def on_train_end(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: If it could not be written.
        """
        super().on_train_end()
        self._checkpoints.finish()

    @override
    def on_validation_start(self) -> None:
        """Keep training's random numbers for its continuation, and give every rank the same buffers."""
        self._exact_resume.before_validation(self._trainer)
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        """Continue with training's random numbers."""
        super().on_validation_end()
        self._exact_resume.after_validation()

    @override
    def _begin_evaluation(self, agrees_on_buffers: bool = True) -> None:
        if agrees_on_buffers:
            self._checkpoints.before_update()  # callbacks may swap weights for the evaluation
        super()._begin_evaluation(agrees_on_buffers)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict. Sharded parameters are DTensors; those of other stages are meta tensors."""
        assert self.lightning_module is not None
        if self._parallel is None:
            return self.lightning_module.state_dict()
        with self.parallel.without_hook_views():
            self.parallel.stop_staying_gathered()
            self.parallel.free()
            return self.lightning_module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by the parameters' full names. A collective where ranks have other parameters.

        Sharded state is DTensors; that of parameters which only other ranks have is on the meta device.
        """
        assert self.lightning_module is not None
        with self.parallel.without_hook_views():
            state = optimizer_state(optimizer, self.lightning_module)
            if not state:
                return state
            if self.parallel.states.has_remote_parameters:
                self._wait_to_save()
            return self.parallel.states.whole_optimizer_state(state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint as a directory, every rank its part; in a fit it is written in the background."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__}.save_checkpoint takes no storage_options: it uses no CheckpointIO.")
        with self.parallel.without_hook_views():
            self._wait_to_save()
            path = self.broadcast(absolute(filepath))  # a name with the time in it, or a relative one, may differ
            self._checkpoints.save(checkpoint, partial(self._rank_state, checkpoint), path)
            if self._has_averages:  # their callbacks change weights before the next step, and not so that it is noticed
                self._checkpoints.before_update()

    def _wait_to_save(self) -> None:
        """Wait until all ranks save: each has a part of what is written."""
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:
            timed_barrier_unless_missed("trainer.save_checkpoint")
            return
        try:  # a callback saves after an error, of this rank alone?
            timed_barrier("Saving a checkpoint after an error", AFTER_ERROR_S)
        except OtherRankError as error:
            announce_error(error)  # which Lightning does not give to on_exception, being in it
            raise

    def _rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what only this rank will read of ``checkpoint``, which is made ready to be written."""
        own = self._exact_resume.rank_state(checkpoint, self._trainer)
        if own:
            own["techniques"] = self.parallel.states.own()
            own["parts_of_batch"] = self._parts_of_batch
        for key in checkpoint.keys() & set(MODELS):
            checkpoint[key] = self.parallel.states.state_to_write(checkpoint[key])
        others = {key: value for key, value in checkpoint.items() if key not in (*MODELS, "optimizer_states")}
        checkpoint |= self.parallel.states.others_to_write(others)
        return own

    @property
    def _parts_of_batch(self) -> list[int]:
        """Return which part of a batch each rank has."""
        return [self.layout.data_parallel_rank(rank) for rank in range(self.world_size)]

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Let the other ranks know that the run has failed on this one, for what comes after it."""
        announce_error(exception)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; not after a save, which all have begun, and which ends for all or for none."""
        if name != "Trainer.save_checkpoint":
            super().barrier(name)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, after the saves that are under way, and unless the last of them fails."""
        self._checkpoints.remove(absolute(filepath))

    def wait_for_checkpoints(self) -> None:
        """Return when what was asked for is written: before a checkpoint that was just saved is read or copied.

        Raises:
            CheckpointError: If the newest could not be written.
        """
        self._checkpoints.finish()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, a directory of any layout or a single file, into tensors placed as this run's are.

        Weights that only other ranks have are on the meta device.
        """
        assert self.lightning_module is not None
        self._checkpoints.settle()
        options, path = self._checkpoint_options, self.broadcast(absolute(checkpoint_path))
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if weights_only is None:
            weights_only = options.weights_only and not self._checkpoints.is_own(path)
        go_on_from = self._go_on_from if is_fitting else None
        checkpoint = loading.load(path, self.lightning_module, is_fitting, weights_only, options.verify, go_on_from)
        if self._parallel is not None:
            for key in checkpoint.keys() & set(MODELS):
                self.parallel.states.add_remote_state(checkpoint[key])
        return checkpoint

    def _go_on_from(self, part: LoadedCheckpoint) -> None:
        has_as_many_ranks = part.manifest.world_size == self.world_size
        own = dict(part.own)
        if own and own.get("parts_of_batch", self._parts_of_batch) != self._parts_of_batch:
            own["buffers"] = {}  # Ranks with the same part of a batch must have the same buffers.
        self._exact_resume.restore(part.state, own, has_as_many_ranks)
        if self._parallel is not None and has_as_many_ranks:
            self.parallel.states.load_own(part.own.get("techniques", {}))
        self._checkpoints.go_on_from(part.manifest)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint that :meth:`load_checkpoint` read."""
        assert self.lightning_module is not None
        with raise_on_all_ranks("loading the weights"):  # which may not fit on one stage of a pipeline alone
            loading.load_weights(checkpoint, self.lightning_module, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states of a checkpoint that :meth:`load_checkpoint` read."""
        assert self.lightning_module is not None
        with raise_on_all_ranks("loading the optimizers' states"):
            loading.load_optimizers(checkpoint, self.optimizers, self.lightning_module)
