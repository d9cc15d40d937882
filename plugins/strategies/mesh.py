"""The strategy under all others: what Lightning asks of a strategy, answered by the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import CheckpointIO, Precision, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dist.after_error import announce_error, check_that_all_ranks_failed
from lightning_dist.checkpoint import LoadedCheckpoint
from lightning_dist.consensus import (
    OtherRankError,
    go_on,
    raise_on_all_ranks,
    timed_barrier,
    timed_barrier_unless_missed,
)
from lightning_dist.initialization import broadcast_weights
from lightning_dist.layout import ParallelLayout
from lightning_dist.local_step import LocalStep
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.parallelize import ParallelConfig, parallelize
from lightning_dist.pipeline import PipelineConfig
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.precision import PrecisionPolicy, agree_on_overflows, precision_policy
from lightning_dist.plugins.strategies import loading
from lightning_dist.plugins.strategies.bookkeeping import absolute
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions, Checkpoints, optimizer_state
from lightning_dist.plugins.strategies.checks import (
    check_optimizers,
    explaining_optimizer_errors,
    refuse_what_cannot_work,
)
from lightning_dist.plugins.strategies.evaluation_batches import EvaluationBatches
from lightning_dist.plugins.strategies.exact_resume import ExactResume
from lightning_dist.plugins.strategies.example_step import example_step
from lightning_dist.plugins.strategies.gradients import are_free_before_forward, free_gradients
from lightning_dist.plugins.strategies.processes import ProcessStrategy
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.plugins.strategies.weighting import LossWeights
from lightning_dist.plugins.strategies.wrapped_hooks import OUTSIDE_OF_STEPS, WrappedHooks
from lightning_dist.randomness import agree_on_random_numbers
from lightning_dist.sharding import ShardingConfig
from lightning_dist.shards_in_hooks import ShardsInHooks
from lightning_dist.tensor_parallel import SameBatch, TensorParallel, TensorParallelConfig
from lightning_dist.units import MIN_NUM_PARAMS

__all__ = ["MeshStrategy"]

AFTER_ERROR_S = 30.0
"""How long a rank that saves or goes on after an error waits for the others, which may be waiting for it elsewhere."""


def _do_nothing() -> None:
    pass


class MeshStrategy(ProcessStrategy):
    """Spreads an ordinary LightningModule over a device mesh; the named strategies only choose the mesh.

    Args:
        units: Class names of the model's repeated blocks, which are sharded as one each. None: Hugging Face's
            ``_no_split_modules``, else the class that repeats in the model's containers.
        min_num_params: Modules outside the blocks are sharded as one from this many parameters on.
        reshard_after_forward: Free a block's gathered parameters after its forward and gather them again for its
            backward (True: least memory), keep them (False: a gather less), or keep them sharded over this many ranks.
        reduce_dtype: What gradients are reduced in (``"float32"``, ``"bfloat16"``). None: float32, or the parameters'
            dtype in 64-true.
        activation_checkpointing: Keep none of a block's activations for the backward, but run the block again.
        compile: Compile each block by ``torch.compile``; a string: by this backend of it.
        direct_collectives: Gather and reduce-scatter in one round, each rank with each other, and a local sum. None:
            where the backend is gloo, whose own take more rounds or more bytes.
        check_replicas_every_n_steps: Compare the replicas' weights bit by bit every so many optimizer steps, and raise
            where they differ. None: never.
        checkpoint: How checkpoints are saved and loaded: the arguments of
            :class:`~lightning_dist.plugins.strategies.checkpointing.CheckpointOptions`.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None: what fits the device.
        timeout: How long a collective may take.
    """

    strategy_name: ClassVar[str] = "mesh"

    def __init__(
        self,
        units: list[str] | None = None,
        min_num_params: int = MIN_NUM_PARAMS,
        reshard_after_forward: bool | int = True,
        reduce_dtype: str | None = None,
        activation_checkpointing: bool = False,
        compile: bool | str = False,
        direct_collectives: bool | None = None,
        check_replicas_every_n_steps: int | None = None,
        checkpoint: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        if check_replicas_every_n_steps is not None and check_replicas_every_n_steps < 1:
            raise ValueError(
                f"check_replicas_every_n_steps={check_replicas_every_n_steps} must be at least 1, or None for never."
            )
        self._units = units
        self._min_num_params = min_num_params
        self._reshard_after_forward = reshard_after_forward
        self._reduce_dtype = reduce_dtype
        self._activation_checkpointing = activation_checkpointing
        self._compile_backend = "inductor" if compile is True else compile or None
        self._direct_collectives = direct_collectives
        self._check_replicas_every_n_steps = check_replicas_every_n_steps
        self._checkpoint_options = checkpoint or CheckpointOptions()
        self._checkpoints = Checkpoints(self._checkpoint_options, timeout)
        self._exact_resume = ExactResume()
        self._layout: ParallelLayout | None = None
        self._mesh: DeviceMesh | None = None
        self._sharded: ParallelModule | None = None
        self._hooks: WrappedHooks | None = None
        self._local_steps: list[LocalStep] = []
        self._weights = LossWeights()
        self._syncs_gradients = True
        self._frees_gradients_first = False
        self._has_averages = False
        self._tensor_parallel = TensorParallelConfig()
        self._data_parallel_group: dist.ProcessGroup | None = None
        self._stage_to_stage_group: dist.ProcessGroup | None = None
        self._same_batch_group: dist.ProcessGroup | None = None
        self._same_batch: SameBatch | None = None
        self._silenced: list[Callback] = []
        self._evaluation: EvaluationBatches | None = None
        self._restore: Callable[[], None] | None = None
        self._restore_loggers: Callable[[], None] = _do_nothing

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of the mesh's axes."""
        if self._layout is None:
            raise RuntimeError("The layout is known once the Trainer has been made.")
        return self._layout

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def check_replicas_every_n_steps(self) -> int | None:
        """Between how many optimizer steps the replicas' weights are compared; None: never."""
        return self._check_replicas_every_n_steps

    @property
    def activation_checkpointing(self) -> bool:
        """Whether blocks are run again in the backward."""
        return self._activation_checkpointing

    @property
    def compile_backend(self) -> str | None:
        """What compiles each block; None: nothing does."""
        return self._compile_backend

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """The dtypes that parameters are gathered and gradients are reduced in."""
        return precision_policy(self.precision_plugin, self._reduce_dtype)

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh, one dimension an axis of the layout."""
        if self._mesh is None:
            raise RuntimeError("The mesh is there once the processes have been launched.")
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the data is split: over the ranks that have a batch of their own."""
        return {
            "num_replicas": self.layout.num_data_parallel,
            "rank": self.layout.data_parallel_rank(self.global_rank),
        }

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin; sharding takes its dtypes from it."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            precision_policy(plugin)
            agree_on_overflows(plugin)
        self._precision_plugin = plugin

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

    def _requested_sizes(self) -> dict[str, int]:
        """Axis to the size asked for; at most one -1. To be given by the named strategies."""
        raise NotImplementedError(f"{type(self).__name__} chooses no mesh; use one of the named strategies.")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # Here sizes that do not fit are found before any process is launched.
        self._layout = ParallelLayout.resolve(self.num_nodes * self.num_processes, **self._requested_sizes())

    def setup_environment(self) -> None:
        """Start the process group and build the mesh; see to it that a fit can be stopped."""
        check_that_all_ranks_failed(AFTER_ERROR_S)
        super().setup_environment()
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, FaultTolerance) for callback in callbacks):
            # Lightning keeps checkpoint callbacks last, so that they save what all others have made of their states.
            first_checkpoint = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(first_checkpoint, FaultTolerance())
        self._mesh = self.layout.build_mesh(self.root_device.type)
        assert self.lightning_module is not None
        _compat.set_device_mesh(self.lightning_module, self._mesh)
        self._data_parallel_group = self.layout.build_data_parallel_group()
        self._same_batch_group = self.layout.build_same_batch_group()
        self._stage_to_stage_group = self.layout.build_stage_to_stage_group()
        _compat.set_timeout(self._timeout)
        if self._same_batch_group is not None:
            self._same_batch = SameBatch(self._same_batch_group, self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create the tensors of ``trainer.init_module``; with ``empty_init`` they are on the meta device.

        Such a module gets its values when it is sharded, as one from ``configure_model`` does, or from a checkpoint.

        Args:
            empty_init: Whether to create no values. None: values are created.
        """
        device = torch.device("meta") if empty_init else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    def restore_when_sharded(self, restore: Callable[[], None]) -> None:
        """Postpone what Lightning restores before :meth:`setup` until the module is sharded, within :meth:`setup`.

        Weights are loaded into shards. Optimizers and ``on_fit_start`` come after it, and find the states of callbacks
        and what the module's ``on_load_checkpoint`` has set, as under any strategy that restores before ``setup``.

        Args:
            restore: Loads the weights, the data module and the callbacks from the checkpoint that was asked for.
        """
        self._restore = restore

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model``: what is created there is on the meta device, and materialised in shards."""
        with torch.device("meta"):
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then make its optimizers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        refuse_what_cannot_work(self, trainer)
        is_new = parallelized(self.lightning_module) is None
        self._give_metrics_their_group(self.lightning_module)
        if is_new:
            self._move_to_device(self.lightning_module)
        self._restore_loggers = _compat.log_graph_before_sharding(trainer, is_sharded=not is_new)
        self._sharded = self._shard(self.lightning_module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                average = _compat.average_model(callback)
                if average is not None:
                    self._has_averages = True
                    self._shard(cast(LightningModule, average.module), copied=self._sharded)
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
        if is_fitting:
            self.setup_optimizers(trainer)
            self._frees_gradients_first = are_free_before_forward(self.lightning_module, trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _compat.optimizers_to_device(self.optimizers, self.root_device)
        self._checkpoints.start(trainer)
        self._hooks = self._wrapped_hooks(self.lightning_module, self._sharded)
        self._hooks.install(trainer)
        if is_new:
            rank_zero_info(startup_table(self, self._sharded))

    def _wrapped_hooks(self, module: LightningModule, spread: ParallelModule) -> WrappedHooks:
        """Let hooks use and change parameters as those of one process, also where torch cannot with shards."""
        shards = ShardsInHooks()

        def around(what: str) -> AbstractContextManager[None]:
            # Between a forward and its backward some parameters are gathered and others sharded.
            is_between = what.endswith((".on_before_zero_grad", ".on_before_backward"))
            return spread.between_forward_and_backward() if is_between else shards.around(what)

        return WrappedHooks(module, OUTSIDE_OF_STEPS, around)

    def _give_metrics_their_group(self, module: LightningModule) -> None:
        """Let torchmetrics gather over the ranks that have a part of the batch, and count each sample once."""
        _compat.let_groups_be_copied()
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self._data_parallel_group

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a metric over the ranks that have a part of the batch."""
        return super().reduce(tensor, self._data_parallel_group if group is None else group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the ranks that have a part of the batch, each part once.

        Args:
            tensor: This rank's; of the same shape on all ranks.
            group: Other ranks to gather over. All processes, which is what ``LightningModule.all_gather`` gives where
                nothing is asked for, are those that have a part of the batch.
            sync_grads: Whether the gradient of what is returned flows back to every rank's ``tensor``.

        Returns:
            The tensors of all ranks, stacked along a new first dimension.
        """
        of_batch = group is None or group is dist.group.WORLD
        return super().all_gather(tensor, self._data_parallel_group if of_batch else group, sync_grads)

    def _shard(self, module: LightningModule, copied: ParallelModule | None = None) -> ParallelModule:
        existing = parallelized(module)
        if existing is not None:
            wanted = self.layout.sharding_mesh(self.mesh)
            if existing.mesh != wanted:
                raise MisconfigurationException(
                    f"This {type(module).__name__} is sharded over {existing.mesh} by an earlier Trainer, and cannot be"
                    f" sharded over {wanted} as well. Make a new one, and load the weights from a checkpoint."
                )
            return existing
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._move_to_device(module)
        splitting = self._tensor_parallel
        split = None if copied is None else copied.get(TensorParallel)
        if split is not None:
            splitting = replace(splitting, planned=split.plan)
        elif self.layout.tp > 1:
            step, why_not = example_step(module, self._trainer)
            splitting = replace(splitting, step=step, why_no_step=why_not)
        config = ParallelConfig(
            units=self._units,
            min_num_params=self._min_num_params,
            sharding=ShardingConfig(
                param_dtype=self.precision_policy.param_dtype,
                reduce_dtype=self.precision_policy.reduce_dtype,
                reshard_after_forward=self._reshard_after_forward,
                direct_collectives=self._direct_collectives,
            ),
            activation_checkpointing=self._activation_checkpointing,
            compile_backend=self._compile_backend,
            check_replicas_every_n_steps=self._check_replicas_every_n_steps,
            tensor_parallel=splitting,
            pipeline=self._pipeline_config(module),
        )
        return parallelize(module, self.layout, self.mesh, config, self._stage_to_stage_group)

    def _pipeline_config(self, module: LightningModule) -> PipelineConfig | None:
        """How the model is cut into stages; None: it is not."""
        return None

    def model_to_device(self) -> None:
        """Move the module to this rank's device; what ``configure_model`` left on the meta device stays there."""
        assert self.lightning_module is not None
        self._move_to_device(self.lightning_module)

    def _move_to_device(self, module: LightningModule) -> None:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.root_device))

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, of the sharded parameters.

        Raises:
            ValueError: If an optimizer holds parameters that are not the module's: it would train nothing.
            MisconfigurationException: If an optimizer cannot work on shards.
        """
        with explaining_optimizer_errors(type(self).__name__):
            super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        check_optimizers(self.optimizers, self.lightning_module, type(self).__name__)
        self._local_steps = [LocalStep(optimizer) for optimizer in self.optimizers]

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``training_step``; a collective, as all steps are."""
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        go_on()
        self._checkpoints.before_step()
        if not automatic:
            self._checkpoints.before_update()
        if self._frees_gradients_first:
            free_gradients(self.lightning_module.trainer)
        assert self._sharded is not None
        self._sharded.before_training_step(self._begins_accumulation)
        with self.precision_plugin.train_step_context():
            output = self._step("training_step", automatic, args, kwargs)
        if automatic:
            self._weights.read(output, self.root_device)
        return output

    @property
    def _begins_accumulation(self) -> bool:
        """Whether the training step that begins is the first whose gradients are reduced together."""
        trainer = self._trainer
        return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``validation_step``."""
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", False, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``test_step``."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step", False, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``predict_step``."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", False, args, kwargs)

    def _step(self, name: str, backward_follows: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        assert self._sharded is not None
        self._check_batch(name, args, kwargs)
        return self._sharded.step(partial(getattr(self.lightning_module, name), *args, **kwargs), backward_follows)

    def _check_batch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._evaluation is not None and name != "training_step":
            self._evaluation.before_step()
        if self._same_batch is not None:
            self._same_batch.check((args, kwargs), f"the batch of a {name}")

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward, in automatic and in manual optimization."""
        assert self._sharded is not None
        assert self.lightning_module is not None
        module, plugin = self.lightning_module, self.precision_plugin
        loss = plugin.pre_backward(self._weights.scale(closure_loss), module)
        with self._sharded.backward():
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        # All gradients are reduced before on_after_backward, which Lightning's own method calls inside.
        if self._syncs_gradients:
            self._weights.normalize(self._sharded.module.parameters(), module.trainer.accumulate_grad_batches)
        return plugin.post_backward(loss, module)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer``."""
        assert self._sharded is not None
        sharded_module = self._sharded

        def closure_then_wait() -> Any:
            output = closure()
            self._checkpoints.before_update()
            sharded_module.before_optimizer_step()
            return output

        try:
            output = super().optimizer_step(optimizer, closure_then_wait, model, **kwargs)
        finally:
            for local_step in self._local_steps:
                local_step.restore()
        self._sharded.after_optimizer_step()
        self._exact_resume.after_update(self._trainer)
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside, backwards only add up each rank's own gradients; Lightning enters it but on the last microbatch."""
        assert self._sharded is not None
        self._sharded.set_gradient_sync(False)
        self._syncs_gradients = False
        try:
            yield
        finally:
            self._sharded.set_gradient_sync(True)
            self._syncs_gradients = True

    def process_dataloader(self, dataloader: object) -> object:
        """Let a training loader be saved and entered where it is, and seed workers by the part of the data."""
        self._exact_resume.process_loader(dataloader, self._trainer)
        if self.layout.shares_batches:
            _compat.seed_workers_by(dataloader, self.layout.data_parallel_rank(self.global_rank))
        return dataloader

    def on_train_start(self) -> None:
        """Go on as the run did that was resumed."""
        self._exact_resume.on_train_start(self._trainer)
        self._agree_on_random_numbers()

    def _agree_on_random_numbers(self) -> None:
        """Let ranks with the same part of the batch augment and drop the same of it."""
        if self._same_batch_group is not None:
            agree_on_random_numbers(self._same_batch_group)

    def on_train_end(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: If it could not be written.
        """
        go_on()
        self._finish_comparing()
        self._checkpoints.finish()

    def on_validation_start(self) -> None:
        """Give every rank rank 0's buffers, as DDP does, so that all evaluate the same model."""
        go_on()
        self._exact_resume.before_validation(self._trainer)
        self._agree_on_random_numbers()
        if not self._trainer.sanity_checking:  # that of a resumed run would change what it goes on with
            self._agree_on_buffers()
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        """Go on with training's random numbers."""
        self._finish_comparing()
        self._end_evaluation()
        self._exact_resume.after_validation()

    def on_test_end(self) -> None:
        """See whether the last batch was the same on ranks that must have the same."""
        self._finish_comparing()
        self._end_evaluation()

    def _begin_evaluation(self) -> None:
        """Let ranks evaluate unequal numbers of batches, as DDP does."""
        assert self._sharded is not None
        self._evaluation = EvaluationBatches(self._trainer)
        if self._evaluation.are_unequal and not self._sharded.holds_whole_model:
            rank_zero_warn(
                f"Ranks have unequal numbers of batches to evaluate ({self._evaluation}). Every rank holds the whole"
                " model until the evaluation ends, since ranks could not gather it together for each batch. Give all"
                " ranks as many batches, by a DistributedSampler, if the model does not fit."
            )
            self._sharded.stay_gathered()

    def _end_evaluation(self) -> None:
        assert self._sharded is not None
        self._sharded.stop_staying_gathered()
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None

    def _finish_comparing(self) -> None:
        if self._same_batch is not None:
            self._same_batch.finish()

    def on_test_start(self) -> None:
        """Give every rank rank 0's buffers."""
        self._agree_on_buffers()
        self._agree_on_random_numbers()
        self._begin_evaluation()

    def on_predict_start(self) -> None:
        """Give every rank rank 0's buffers, and let one rank of those with the same samples return predictions."""
        self._agree_on_buffers()
        self._agree_on_random_numbers()
        self._begin_evaluation()
        if self._same_batch_group is not None and dist.get_rank(self._same_batch_group) > 0:
            self._silenced = _compat.silence_predictions(self._trainer)

    def on_predict_end(self) -> None:
        """Give the callbacks back that :meth:`on_predict_start` took away."""
        self._finish_comparing()
        self._end_evaluation()
        self._trainer.callbacks += self._silenced  # type: ignore[attr-defined]
        self._silenced = []

    def _agree_on_buffers(self) -> None:
        self._checkpoints.before_update()  # callbacks may swap weights for the evaluation
        assert self.lightning_module is not None
        broadcast_weights(self.lightning_module, buffers_only=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict; sharded parameters are DTensors."""
        assert self.lightning_module is not None
        if self._sharded is not None:
            self._sharded.stop_staying_gathered()
            self._sharded.free()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, parameters by full name; sharded state is DTensors."""
        assert self.lightning_module is not None
        return optimizer_state(optimizer, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint as a directory, every rank its part; in a fit it is written in the background."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__}.save_checkpoint takes no storage_options: it uses no CheckpointIO.")
        self._arrive_to_save()
        path = self.broadcast(absolute(filepath))  # a name with the time in it, or a relative one, may differ
        self._checkpoints.save(checkpoint, partial(self._rank_state, checkpoint), path)
        if self._has_averages:  # their callbacks change weights before the next step, and not so that it is noticed
            self._checkpoints.before_update()

    def _arrive_to_save(self) -> None:
        """See to it that all ranks save: each has a part of what is written."""
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:
            timed_barrier_unless_missed("trainer.save_checkpoint")
            return
        try:  # a callback saves after an error, of this rank alone?
            timed_barrier("Saving a checkpoint after an error", AFTER_ERROR_S)
        except OtherRankError as error:
            announce_error(error)  # which Lightning does not give to on_exception, being in it
            raise

    def _rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What only this rank will read of ``checkpoint``, which is made ready to be written."""
        own = self._exact_resume.rank_state(checkpoint, self._trainer)
        if own and self._sharded is not None:
            own["techniques"] = self._sharded.state()
        return own

    def on_exception(self, exception: BaseException) -> None:
        """Let the other ranks know that the run has failed on this one, for what comes after it."""
        announce_error(exception)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; not after a save, which all have begun, and which ends for all or for none."""
        if name != "Trainer.save_checkpoint":
            super().barrier(name)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, after the saves that are under way, and unless the last of them fails."""
        self._checkpoints.remove(absolute(filepath))

    def wait_for_checkpoints(self) -> None:
        """Return when what was asked for is written: before a checkpoint that was just saved is read or copied.

        Raises:
            CheckpointError: If the newest could not be written.
        """
        self._checkpoints.finish()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, a directory of any layout or a single file, into tensors placed as this run's are."""
        assert self.lightning_module is not None
        self._checkpoints.settle()
        options, path = self._checkpoint_options, self.broadcast(absolute(checkpoint_path))
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if weights_only is None:
            weights_only = options.weights_only and not self._checkpoints.is_own(path)
        return loading.load(
            path,
            self.lightning_module,
            is_fitting,
            weights_only,
            options.verify,
            self._go_on_from if is_fitting else None,
        )

    def _go_on_from(self, part: LoadedCheckpoint) -> None:
        has_as_many_ranks = part.manifest.world_size == self.world_size
        self._exact_resume.restore(part.state, part.own, has_as_many_ranks)
        if self._sharded is not None and has_as_many_ranks:
            self._sharded.load_state(part.own.get("techniques", {}))
        self._checkpoints.go_on_from(part.manifest)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint that :meth:`load_checkpoint` read."""
        assert self.lightning_module is not None
        with raise_on_all_ranks("loading the weights"):  # which may not fit on one stage of a pipeline alone
            loading.load_weights(checkpoint, self.lightning_module, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states of a checkpoint that :meth:`load_checkpoint` read."""
        assert self.lightning_module is not None
        with raise_on_all_ranks("loading the optimizers' states"):
            loading.load_optimizers(checkpoint, self.optimizers, self.lightning_module)

    def teardown(self) -> None:
        """Free gathered parameters; the module stays sharded and on its device, and gets its own hooks back."""
        self._checkpoints.close()
        if self._hooks is not None:
            self._hooks.remove()
        for local_step in self._local_steps:
            local_step.remove()
        self._local_steps = []
        self._restore_loggers()
        if self._sharded is not None:
            self._sharded.free()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
