"""Save and load the checkpoints of a run, to which every rank writes its part, and resume it exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist._compat import tree_map
from lightning_dist.checkpoint import TECHNIQUES, CheckpointError, LoadedCheckpoint
from lightning_dist.checkpoint.between_replicas import from_replica, to_replica
from lightning_dist.checkpoint.state import OwnStates
from lightning_dist.mesh.consensus import (
    OtherRankError,
    raise_on_all_ranks,
    timed_barrier,
    timed_barrier_unless_missed,
)
from lightning_dist.plugins import _compat
from lightning_dist.plugins._compat.progress import leave_out_running_batch
from lightning_dist.plugins.callbacks.fault_tolerance import shown_path
from lightning_dist.plugins.precision import MeshPrecision
from lightning_dist.plugins.strategies import loading
from lightning_dist.plugins.strategies.bookkeeping import absolute
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions, Checkpoints, optimizer_state
from lightning_dist.plugins.strategies.exact_resume import MODELS, ExactResume
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.plugins.strategies.tuning import is_of_tuning
from lightning_dist.run.after_error import announce_error

__all__ = ["AFTER_ERROR_S", "RunCheckpoints", "StatesOfOwners"]

AFTER_ERROR_S = 30.0
"""Seconds for which a rank that saves or goes on after an error waits for the others, which may wait elsewhere."""


class StatesOfOwners(Protocol):
    """Provide the states of optimizers that step on whole parameters; only the owner of a parameter has its state."""

    def own_states(self, optimizer: Optimizer) -> OwnStates | None:
        """Return a function that returns which states of an optimizer this rank keeps; None: its shards of all."""

    def with_states_of_owners(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with the states of parameters that only their owners have."""


class RunCheckpoints:
    """Save and load the checkpoints of a strategy's runs.

    Args:
        host: The strategy whose runs these are.
        options: Options for saving and loading.
        checkpoints: Object that writes and removes checkpoints.
        owners: Object that knows which rank has the states of optimizers.
    """

    def __init__(
        self, host: Host, options: CheckpointOptions, checkpoints: Checkpoints, owners: StatesOfOwners
    ) -> None:
        self._host = host
        self._options = options
        self._checkpoints = checkpoints
        self._owners = owners
        self._exact_resume = ExactResume()
        self._restore: Callable[[], None] | None = None

    def postpone(self, restore: Callable[[], None]) -> None:
        """Keep what Lightning restores before the module is sharded, for :meth:`restore_now`."""
        self._restore = restore

    def restore_now(self) -> None:
        """Restore what was postponed, into shards."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def process_dataloader(self, dataloader: object) -> None:
        """Let a training loader save and resume its position."""
        self._exact_resume.process_loader(dataloader, self._host.trainer)

    def before_train_start(self) -> None:
        """Restore the random state of the run that is resumed."""
        self._exact_resume.on_train_start(self._host.trainer)

    def after_train_start(self) -> None:
        """Count the batches of accumulations, and synchronize replicas before validations if they may differ."""
        self._exact_resume.watch_accumulations(self._host.trainer)
        if self._host.parallel.lets_replicas_differ:
            _compat.before_validation(self._host.trainer, self._synchronize_replicas)

    def after_train_end(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: If it could not be written.
        """
        self._checkpoints.finish()
        self._host.parallel.synchronize_replicas()

    def before_validation(self) -> None:
        """Save the random state of training until validation ends."""
        self._exact_resume.before_validation(self._host.trainer)

    def after_validation(self) -> None:
        """Restore the random state that training had before validation."""
        self._exact_resume.after_validation()

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict. Sharded parameters are DTensors; those of other stages are meta tensors."""
        host = self._host
        if not host.is_set_up:
            return host.module.state_dict()
        with host.parallel.without_hook_views():
            self._checkpoints.before_update()  # Hooks for this checkpoint may change weights that another one copies.
            host.parallel.stop_staying_gathered()
            host.parallel.free()
            if host.parallel.lets_replicas_differ:
                self._wait_to_save()
                self._synchronize_replicas()
            return host.module.state_dict()

    def _synchronize_replicas(self) -> None:
        """Give all replicas the same weights. This is a collective if their weights may differ now."""
        self._checkpoints.before_update()
        self._host.parallel.synchronize_replicas()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by the parameters' full names.

        Sharded states are DTensors; the states of parameters that only other ranks have are on the meta device. This is
        a collective if ranks have different parameters.
        """
        parallel = self._host.parallel
        with parallel.without_hook_views():
            state = optimizer_state(optimizer, self._host.module)
            if not state:
                return state
            if parallel.states.has_remote_parameters or self._owners.own_states(optimizer) is not None:
                self._wait_to_save()
            whole = parallel.states.whole_optimizer_state(state)
            return self._owners.with_states_of_owners(optimizer, whole)

    def save(self, checkpoint: dict[str, Any], filepath: Any, parts: list[int], settings: Mapping[str, Any]) -> None:
        """Save the checkpoint as a directory to which every rank writes its part; in a fit, in the background.

        Args:
            checkpoint: Lightning's checkpoint: weights, states of optimizers and loops, and what callbacks add.
            filepath: Path or URL of the directory.
            parts: For each rank, the index of the part of a batch that it has.
            settings: How the run trains.
        """
        with self._host.parallel.without_hook_views():
            self._wait_to_save()
            # Names that contain the time, and relative names, may differ between ranks.
            path = self._host.broadcast(absolute(filepath))
            self._checkpoints.save(checkpoint, partial(self._rank_state, checkpoint, parts), path, settings)

    def _wait_to_save(self) -> None:
        """Wait until all ranks save, because each has a part of the checkpoint.

        Raises:
            OtherRankError: If not all ranks save.
        """
        if self._host.trainer.state.status != TrainerStatus.INTERRUPTED:
            timed_barrier_unless_missed("trainer.save_checkpoint")
            return
        try:  # A callback saves after an error, which may have occurred on this rank alone.
            timed_barrier("Saving a checkpoint after an error", AFTER_ERROR_S)
        except OtherRankError as error:
            announce_error(error)  # Lightning is in on_exception already, and does not call it for this error.
            raise

    def _rank_state(self, checkpoint: dict[str, Any], parts: list[int]) -> dict[str, Any]:
        """Return this rank's own state for ``checkpoint``, and change ``checkpoint`` so that it can be written."""
        states = self._host.parallel.states
        own = self._exact_resume.rank_state(checkpoint, self._host.trainer)
        if "optimizer_states" in checkpoint:
            checkpoint[TECHNIQUES] = states.of_techniques()
        if own:
            own["parts_of_batch"] = parts
        for key in checkpoint.keys() & set(MODELS):
            checkpoint[key] = states.state_to_write(checkpoint[key])
        apart = (*MODELS, "optimizer_states", TECHNIQUES)
        others = {key: value for key, value in checkpoint.items() if key not in apart}
        checkpoint |= states.hook_state_to_write(others)
        return own

    def report_exception(self, exception: BaseException) -> None:
        """Announce to the other ranks that the run has failed on this rank, so that they do not wait for it.

        After Ctrl-C, rank 0 says what was saved.
        """
        announce_error(exception)
        if isinstance(exception, KeyboardInterrupt):
            self._checkpoints.wait()
            rank_zero_info(f"Stopped by Ctrl-C, with exit code 1: the run is not done. {self.what_was_saved()}")

    def what_was_saved(self) -> str:
        """Return a sentence on the newest checkpoint of a fit and on how to resume it; the sentence has no line breaks.

        It is empty outside of a fit. This is no collective.
        """
        if self._host.trainer.state.fn != TrainerFn.FITTING:
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

    def remove(self, filepath: Any) -> None:
        """Remove a checkpoint after the saves that are under way have ended, unless the last of them has failed."""
        path = absolute(filepath)
        self._checkpoints.remove(self._host.broadcast(path) if is_of_tuning(filepath) else path)

    def load(self, checkpoint_path: Any, weights_only: bool | None, parts: list[int]) -> dict[str, Any]:
        """Read a checkpoint (a directory of any layout or a single file) into tensors that are sharded as this run's.

        Weights that only other ranks have are on the meta device.

        Args:
            checkpoint_path: Path or URL of the checkpoint.
            weights_only: Whether objects of unknown classes are refused; None: as the options say.
            parts: For each rank, the index of the part of a batch that it has.
        """
        host = self._host
        self._checkpoints.finish_pending()
        options, path = self._options, host.broadcast(absolute(checkpoint_path))
        is_fitting = host.trainer.state.fn == TrainerFn.FITTING
        if weights_only is None:
            weights_only = options.weights_only and not self._checkpoints.is_own(path)
        go_on_from = partial(self._go_on_from, path, parts) if is_fitting else None
        states = host.parallel.states if host.is_set_up else None
        checkpoint = loading.load(path, host.module, is_fitting, states, weights_only, options.verify, go_on_from)
        if states is not None:
            for key in checkpoint.keys() & set(MODELS):
                states.add_remote_state(checkpoint[key])
        return checkpoint

    @property
    def has_owners_of_states(self) -> bool:
        """Return whether an optimizer keeps the states of each parameter on one rank."""
        return any(self._owners.own_states(optimizer) is not None for optimizer in self._host.optimizers)

    def to_replica(self) -> dict[str, Any]:
        """Return this rank's state of a fit for another replica, with the tensors of the run themselves.

        This is no collective, and may be called by another thread while the fit waits before a step.
        """
        trainer, parallel = self._host.trainer, self._host.parallel
        with parallel.without_hook_views():
            checkpoint = _compat.dump_checkpoint(trainer)
            leave_out_running_batch(checkpoint["loops"])
            own = self._exact_resume.rank_state(checkpoint, trainer)
        own["buffers"] = tree_map(_copied, own["buffers"])  # The step changes them while they are sent.
        checkpoint[TECHNIQUES] = parallel.states.of_techniques()
        return {"checkpoint": to_replica(checkpoint), "own": own}

    def from_replica(self, state: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
        """Return the checkpoint from which a fit continues on this rank.

        Args:
            state: What :meth:`to_replica` has returned on the rank of another replica with the same number.
            mesh: The mesh of this replica.
        """
        checkpoint: dict[str, Any] = from_replica(state["checkpoint"], mesh)
        self._exact_resume.restore(checkpoint, state["own"], is_divided_alike=True)
        techniques = checkpoint.pop(TECHNIQUES)
        if self._host.is_set_up:
            self._host.parallel.states.load_techniques(techniques)
        return checkpoint

    def take_over(self, state: dict[str, Any], mesh: DeviceMesh) -> None:
        """Load weights and the states of optimizers that another replica has after the running step.

        Learning rates and other settings of parameter groups stay those before the step, because schedulers have not
        seen it yet.

        Args:
            state: What :meth:`to_replica` has returned on the rank of another replica with the same number.
            mesh: The mesh of this replica.
        """
        checkpoint: dict[str, Any] = from_replica(state["checkpoint"], mesh)
        # Lightning's WeightAveraging puts averages in the place of the weights.
        checkpoint["state_dict"] = checkpoint.get("current_model_state", checkpoint["state_dict"])
        groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in self._host.optimizers]
        buffers = {name: buffer.clone() for name, buffer in self._host.module.named_buffers()}
        self.load_weights(checkpoint, strict=True)
        self.load_optimizers(checkpoint)
        for name, buffer in self._host.module.named_buffers():  # Each replica has its own, as after any other step.
            buffer.copy_(buffers[name])
        for optimizer, of_groups in zip(self._host.optimizers, groups, strict=True):
            for group, settings in zip(optimizer.param_groups, of_groups, strict=True):
                group.update(settings)

    def _go_on_from(self, path: str, parts: list[int], part: LoadedCheckpoint) -> None:
        has_as_many_ranks = part.manifest.world_size == self._host.world_size
        own = part.rank_state
        # Ranks with the same part of a batch must have the same buffers, and the same position in the data.
        is_divided_alike = has_as_many_ranks and own.get("parts_of_batch", parts) == parts
        self._exact_resume.restore(part.state, own, is_divided_alike)
        states = part.state.pop(TECHNIQUES, {})
        if self._host.is_set_up:
            self._host.parallel.states.load_techniques(states)
        self._checkpoints.go_on_from(path, part.manifest)

    def load_weights(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of a checkpoint that :meth:`load` read."""
        with raise_on_all_ranks("loading the weights"):  # They may fail to fit on only one stage of a pipeline.
            loading.load_weights(checkpoint, self._host.module, strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states of a checkpoint that :meth:`load` read."""
        with raise_on_all_ranks("loading the optimizers' states"):
            plugin = self._host.precision_plugin
            # Moments of parameters with master weights are wider than the parameters.
            keeps_dtypes = isinstance(plugin, MeshPrecision) and plugin.master_weights is not None
            own_states = self._owners.own_states
            loading.load_optimizers(checkpoint, self._host.optimizers, self._host.module, keeps_dtypes, own_states)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
