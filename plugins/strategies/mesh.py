"""Define the base class of all strategies, which implements Lightning's interface of a strategy.

Its methods stand in the order in which Lightning calls them, and delegate to the objects of which a strategy consists:

- ``processes``: Launches the processes of a run and lets them communicate (the base class).
- ``shared_batches``: Divides batches among ranks.
- ``building``: Makes modules parallel.
- ``step_runner``: Runs the steps of the module and of its optimizers.
- ``run_checkpoints``: Saves and loads checkpoints, and resumes runs exactly.
- ``elastic_run``: Lets replicas leave and join a run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import CheckpointIO, Precision, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.mesh.consensus import announce_progress
from lightning_dist.mesh.groups import MeshGroups
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.deferred_init import deferred_init
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.parallelize import ParallelConfig, options_from
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks import BeforeProcesses, FaultTolerance
from lightning_dist.plugins.precision import MeshPrecision, agree_on_overflows, check_reduce_dtype, precision_policy
from lightning_dist.plugins.strategies.arguments import (
    Argument,
    refuse_unknown_arguments,
    show_arguments,
    written_arguments,
)
from lightning_dist.plugins.strategies.building import ModuleBuilder
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions, Checkpoints
from lightning_dist.plugins.strategies.checks import (
    check_fit,
    check_run,
    explaining_optimizer_errors,
    refuse_what_cannot_work,
    warn_of_idle_arguments,
)
from lightning_dist.plugins.strategies.elastic_run import RUNNING_REPLICA, ElasticRun
from lightning_dist.plugins.strategies.example_input import run_example
from lightning_dist.plugins.strategies.logged_runs import continue_runs
from lightning_dist.plugins.strategies.optimizer_steps import OptimizerStep, check_optimizer_step
from lightning_dist.plugins.strategies.processes import ProcessStrategy
from lightning_dist.plugins.strategies.run_checkpoints import AFTER_ERROR_S, RunCheckpoints
from lightning_dist.plugins.strategies.shared_batches import BatchOptions, SharedBatches
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.plugins.strategies.step_runner import OptimizerOwners, StepRunner
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.plugins.strategies.tuning import agree_on_trials, refuse_batch_size_finder
from lightning_dist.run.after_error import check_that_all_ranks_failed
from lightning_dist.run.watchdog import record_collectives
from lightning_dist.techniques.options import PrecisionPolicy

__all__ = ["MeshStrategy"]

_Value = TypeVar("_Value")


def _do_nothing() -> None:
    pass


def _is_ours(strategy: object) -> bool:
    return isinstance(strategy, MeshStrategy)


def _existing(value: _Value | None, when: str) -> _Value:
    """Return ``value``, or raise an error if it does not exist yet.

    Args:
        value: The value; None: it does not exist yet.
        when: A sentence that says when it exists, for the error.

    Raises:
        RuntimeError: If it does not exist yet.
    """
    if value is None:
        raise RuntimeError(when)
    return value


class MeshStrategy(ProcessStrategy):
    """Spread an ordinary LightningModule over a device mesh.

    The strategies that users choose by name derive from this class, and choose the axes of the mesh.

    Args:
        units: Class names of the model's repeated blocks, each of which is sharded as one unit. None: Hugging Face's
            ``_no_split_modules``, else the class that repeats in the model's containers.
        reduce_dtype: Dtype in which gradients are reduced (``"float32"``, ``"bfloat16"``, ``"float64"``). None:
            float32, or the parameters' dtype with 64-true.
        optimizer_step: Where optimizers step. ``"shards"``: each rank on its shards, which is right for optimizers that
            update each element by itself. ``"whole"``: on whole parameters; each rank owns some of them, gathers their
            gradients, and has their states. ``"dtensors"``: on the sharded parameters themselves, for optimizers that
            were written for DTensors. ``"auto"``: on shards if a trial of the optimizer on small tensors shows that
            this computes the same, and on whole parameters otherwise.
        global_batch_size: Number of samples in an optimizer step over all ranks. The batch size of training loaders is
            set to this number divided by those of data-parallel ranks and of accumulated batches. None: loaders keep
            their batch sizes, so that a step takes more samples on more ranks.
        uneven_batches: What ranks do where they have unequal numbers of batches. ``"stop"``: all of them end an epoch
            of training when the first one has no more batches, with a warning; in an evaluation, each runs its own.
            ``"raise"``: an error on all ranks.
        keep_data_order: Whether all ranks together see the samples of a training loader in the order of its sampler, so
            that a loader with ``shuffle=False``, or with a sampler of the user's own, gives the batches that one
            process would see. False: training loaders are shuffled whatever their sampler is, as Lightning does.
        checkpoint: Options for saving and loading checkpoints: the arguments of
            :class:`~lightning_dist.plugins.strategies.checkpointing.CheckpointOptions`, or a dictionary of them.
        process_group_backend: Backend such as ``"nccl"`` or ``"gloo"``; None: the default for the device.
        timeout: The time for which ranks wait for each other in a collective; None: torch's default.
        options: Arguments of techniques, such as ``tiled_mlp``, which the options in
            :data:`lightning_dist.parallelize.OPTIONS` define.

    Raises:
        ValueError: If an argument has none of its accepted values.
        TypeError: If an argument is unknown.
    """

    strategy_name: ClassVar[str] = "mesh"

    offers: ClassVar[frozenset[str]] = frozenset()
    """The axes whose sizes the strategy chooses, and other features; some arguments of techniques need them."""

    chooses_layout: ClassVar[bool] = False
    """Whether the layout is known only after :meth:`settle_layout`."""

    _written: ClassVar[dict[str, Argument]] = {}
    """The arguments that the constructors of the class and its bases name."""

    def __init__(
        self,
        units: list[str] | None = None,
        reduce_dtype: str | None = None,
        optimizer_step: OptimizerStep = "auto",
        global_batch_size: int | None = None,
        uneven_batches: str = "stop",
        keep_data_order: bool = True,
        checkpoint: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        refuse_unknown_arguments(type(self), options, self._written, self.offers)
        check_reduce_dtype(reduce_dtype)
        self._config = ParallelConfig(units, options_from(options))
        self._reduce_dtype = reduce_dtype
        self._batch_options = BatchOptions(global_batch_size, uneven_batches, keep_data_order)
        self._owners = OptimizerOwners(check_optimizer_step(optimizer_step))
        checkpoint_options = CheckpointOptions.of(checkpoint)
        self._checkpoints = Checkpoints(checkpoint_options, timeout)
        self._run_checkpoints = RunCheckpoints(self, checkpoint_options, self._checkpoints, self._owners)
        self._elastic = ElasticRun(self, self._run_checkpoints)
        self.resumes_from: Any = None
        """The path of the checkpoint that the coming fit resumes; None: it begins anew."""
        self._layout: ParallelLayout | None = None
        self._groups: MeshGroups | None = None
        self._tracing: StepTracing | None = None
        self._batches: SharedBatches | None = None
        self._builder: ModuleBuilder | None = None
        self._parallel: ParallelModule | None = None
        self._runner: StepRunner | None = None
        self._restore_loggers: Callable[[], None] = _do_nothing

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the constructor of a strategy show the arguments of techniques.

        The constructors of users' classes stay as they are; jsonargparse follows their calls of ``super().__init__``.
        """
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("lightning_dist."):
            return
        if "__init__" not in vars(cls) and "offers" in vars(cls):

            def create(self: MeshStrategy, **kwargs: Any) -> None:
                super(cls, self).__init__(**kwargs)

            cls.__init__ = create  # type: ignore[assignment, method-assign]
        if "__init__" in vars(cls):
            cls._written = {**written_arguments(cls), **cls._written}
            cls.show_arguments()

    @classmethod
    def show_arguments(cls) -> None:
        """Let the constructors of this class and those derived from it show the arguments of all techniques."""
        if "_written" in vars(cls):
            shared = MeshStrategy._written
            own = {name: argument for name, argument in cls._written.items() if name not in shared}
            show_arguments(cls, own, shared, cls.offers)
        for derived in cls.__subclasses__():
            derived.show_arguments()

    @classmethod
    def written_names(cls) -> set[str]:
        """Return the names of the arguments that the constructors of this class and those derived from it name."""
        return set(cls._written).union(*(derived.written_names() for derived in cls.__subclasses__()))

    # The objects that exist from a certain point of a run on

    @property
    def config(self) -> ParallelConfig:
        """Return the options of all techniques."""
        return self._config

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments that change what a step computes and keeps, besides the mesh's sizes."""
        return {
            "units": self._config.units,
            "reduce_dtype": self._reduce_dtype,
            "optimizer_step": self._owners.where,
            **asdict(self._batch_options),
            **self._config.arguments,
        }

    @property
    def layout(self) -> ParallelLayout:
        """Return the sizes of the mesh's axes."""
        return _existing(self._layout, "The layout is known once the Trainer has been created.")

    @property
    def groups(self) -> MeshGroups:
        """Return the mesh and the groups of ranks."""
        return _existing(self._groups, "The mesh exists once the processes have been launched.")

    @property
    def mesh(self) -> DeviceMesh:
        """Return the device mesh, with one dimension for each axis of the layout."""
        return self.groups.mesh

    @property
    def batches(self) -> SharedBatches:
        """Return the object that divides batches among ranks."""
        return _existing(self._batches, "Batches are divided once the processes have been launched.")

    @property
    def builder(self) -> ModuleBuilder:
        """Return the object that makes modules parallel."""
        return _existing(self._builder, "Modules are made parallel once the processes have been launched.")

    @property
    def is_set_up(self) -> bool:
        """Return whether the module has been made parallel."""
        return self._parallel is not None

    @property
    def parallel(self) -> ParallelModule:
        """Return the parallel module."""
        return _existing(self._parallel, "The module is made parallel when the strategy is set up.")

    @property
    def runner(self) -> StepRunner:
        """Return the object that runs steps."""
        return _existing(self._runner, "Steps can run once the strategy is set up.")

    @property
    def elastic(self) -> ElasticRun:
        """Return the object by which this process takes part in a run whose replicas leave and join."""
        return self._elastic

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0, of the replica that logs and saves if replicas leave and join."""
        return self.global_rank == 0 and self._elastic.is_leader

    @property
    def module(self) -> LightningModule:
        """Return the user's module."""
        return _existing(self.lightning_module, "The module is known once the Trainer runs it.")

    @property
    def trainer(self) -> Trainer:
        """Return the Trainer that runs the module."""
        return self.module.trainer

    # Precision

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """Return the dtypes in which parameters are gathered and gradients are reduced."""
        return precision_policy(self.precision_plugin, self._reduce_dtype)

    @property
    def precision_plugin(self) -> Precision:
        """Return Lightning's precision plugin, which determines the dtypes of sharding."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            precision_policy(plugin, self._reduce_dtype)
            agree_on_overflows(plugin)
        self.set_precision_plugin(plugin)

    # Before a run: the processes, the mesh, the module and its optimizers

    def _requested_sizes(self) -> dict[str, int]:
        """Return the requested size of each axis, of which at most one is -1. The named strategies override this."""
        raise NotImplementedError(f"{type(self).__name__} chooses no mesh; use one of the named strategies.")

    @override
    def configure_launcher(self) -> None:
        """Resolve the layout as well, and check that the requested techniques work together."""
        super().configure_launcher()
        # The layout is resolved here, so that sizes that do not fit are found before any process is launched.
        self._layout = ParallelLayout.resolve(self.num_nodes * self.num_processes, **self._requested_sizes())
        if isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin.use_device(self.root_device.type)
        check_run(self)

    @override
    def setup_environment(self) -> None:
        """Start the process group, build the mesh, and make sure that a fit can be stopped."""
        check_that_all_ranks_failed(AFTER_ERROR_S)
        for options in self._config.arguments.options:
            self._process_group_backend = options.backend(self._process_group_backend, self.root_device)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in list(callbacks):
            if isinstance(callback, BeforeProcesses):
                callback.before_processes(self.trainer)
        if any(isinstance(callback, FaultTolerance) and callback.hang_timeout for callback in callbacks):
            record_collectives()
        super().setup_environment()
        self.settle_layout()
        self._groups = groups = MeshGroups.build(self.layout, self.root_device.type)
        _compat.set_device_mesh(self.module, groups.mesh)
        _compat.set_timeout(self._timeout)
        peers = dist.get_process_group_ranks(groups.same_stage)
        self._tracing = StepTracing(self.layout.num_data_parallel, peers)
        self._batches = SharedBatches(self, self._batch_options)
        self._builder = ModuleBuilder(self, self._tracing)
        refuse_batch_size_finder(self.trainer, self.layout, self._batch_options.global_batch_size)
        agree_on_trials(self.trainer)
        if not any(isinstance(callback, FaultTolerance) for callback in callbacks):
            # Lightning keeps checkpoint callbacks last, so that they save the states that all others have updated.
            first_checkpoint = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(first_checkpoint, FaultTolerance())
        self._elastic.join()
        # Hooks such as configure_optimizers may let Lightning make the loaders before this strategy is set up.
        self.batches.agree_on_batches(self.distributed_sampler_kwargs)
        if self.trainer.state.fn == TrainerFn.FITTING and not self._elastic.joins_others:
            continue_runs(self.trainer, self.resumes_from)

    def settle_layout(self) -> None:
        """Change the layout now that ranks can communicate; a strategy that chooses its sizes overrides this."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Return the context of ``trainer.init_module``, in which tensors are on the meta device with ``empty_init``.

        Such a module gets its values when it is sharded, like one from ``configure_model``, or from a checkpoint.

        Args:
            empty_init: Whether to create tensors without values. None: values are created.
        """
        on_device = deferred_init(self.root_device) if empty_init else self.root_device
        with on_device, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Return the context in which ``configure_model`` creates meta tensors, which get their values when sharded."""
        with deferred_init(self.root_device):
            yield

    @override
    def model_to_device(self) -> None:
        """Move the module to this rank's device, except tensors that ``configure_model`` left on the meta device."""
        self.builder.move_to_device(self.module)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Make the module parallel, then make its optimizers."""
        module, arguments = self.module, self._config.arguments
        _existing(self.accelerator, "The Trainer gives a strategy its accelerator.").setup(trainer)
        refuse_what_cannot_work(self, trainer)
        check_fit(self, trainer)
        if self.layout.world_size > self.layout.dp_replicate:
            _compat.evaluate_without_inference_mode(trainer)
        is_new = parallelized(module) is None
        self.batches.give_metrics_their_group(module)
        if is_new:
            warn_of_idle_arguments(arguments, self.layout)
            self.model_to_device()
        self._restore_loggers = _compat.log_graph_before_sharding(trainer, is_sharded=not is_new)
        self._parallel = self.builder.build(module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.builder.build_averages()
        self._run_checkpoints.restore_now()
        if is_fitting:
            _compat.agree_on_decisions(trainer)
            if arguments.lets_replicas_differ and self.layout.world_size == self.layout.dp_replicate:
                _compat.allow_skipped_steps(trainer)
            self.setup_optimizers(trainer)
            self._elastic.check()
        self.setup_precision_plugin()
        if is_fitting and not any(options.keeps_states_elsewhere for options in arguments.options):
            _compat.optimizers_to_device(self.optimizers, self.root_device)
        _compat.reduce_losses_of_finders(_is_ours)
        _compat.weigh_ranks_exactly(_is_ours)
        self._checkpoints.start(trainer)
        tracing = _existing(self._tracing, "Steps are traced once the processes have been launched.")
        catch_up = self._elastic.catch_up
        self._runner = StepRunner(self, self.batches, self._checkpoints, self._owners, tracing, catch_up)
        _compat.set_timeout(self._timeout)  # Techniques and steps have created groups with torch's default timeout.
        _compat.run_examples_by(run_example)
        if is_new:
            rank_zero_info(startup_table(self, self._parallel))

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and let each step on the tensors on which it computes what it does in one process.

        This is a collective over all processes.

        Raises:
            ValueError: If an optimizer holds parameters that are not the module's.
            MisconfigurationException: If an optimizer cannot work with another setting, or with the layout.
        """
        with explaining_optimizer_errors(type(self).__name__):
            super().setup_optimizers(trainer)
        self._owners.set_up(self)

    @property
    def optimizer_rows(self) -> list[tuple[str, str]]:
        """Return the rows about optimizers for the table at the start of a run."""
        return self._owners.rows

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that distinguish this run in a logger, besides the layout; None: not in use."""
        of_techniques = [options.settings(self.parallel) for options in self._config.arguments.options]
        settings = {name: value for own in of_techniques for name, value in own.items()}
        where = self._owners.where
        return {**settings, "optimizer_step": None if where == "auto" else where}

    # Batches, and the begin and the end of loops

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the number of parts into which the data are divided, and the index of this rank's part."""
        own = {
            "num_replicas": self.layout.num_data_parallel,
            "rank": self.layout.data_parallel_rank(self.global_rank),
        }
        return self._elastic.share(own)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader give this rank its part of the batches, and save and resume its position."""
        self.batches.process_dataloader(dataloader)
        self._elastic.process_dataloader(dataloader)
        self._run_checkpoints.process_dataloader(dataloader)
        return dataloader

    @override
    def on_train_start(self) -> None:
        """Restore the random state of the run that is resumed, and print the global batch."""
        self._run_checkpoints.before_train_start()
        self.batches.on_train_start()
        self._run_checkpoints.after_train_start()
        self._elastic.on_train_start()

    @override
    def on_train_end(self) -> None:
        """Check the last batch, and wait for the last checkpoint.

        Raises:
            CheckpointError: If it could not be written.
        """
        self.batches.on_train_end()
        self._run_checkpoints.after_train_end()

    @override
    def on_validation_start(self) -> None:
        """Save the random state of training, and give every rank the same buffers, so that all evaluate alike."""
        self._run_checkpoints.before_validation()
        announce_progress()
        # The sanity check leaves buffers as they are, because making them equal would change a resumed run.
        self._begin_evaluation(agrees_on_buffers=not self.trainer.sanity_checking)

    @override
    def on_validation_end(self) -> None:
        """Free what the evaluation has gathered, and restore the random state that training had before."""
        self.batches.end_evaluation()
        self._run_checkpoints.after_validation()

    @override
    def on_test_start(self) -> None:
        """Give every rank the same buffers."""
        self._begin_evaluation()

    @override
    def on_test_end(self) -> None:
        """Check the last batch, and free what the evaluation has gathered."""
        self.batches.end_evaluation()

    @override
    def on_predict_start(self) -> None:
        """Give every rank the same buffers, and let only one of the ranks with the same samples return predictions."""
        self._begin_evaluation()
        self.batches.silence_predictions()

    @override
    def on_predict_end(self) -> None:
        """Give the Trainer back the callbacks that :meth:`on_predict_start` has removed from it."""
        self.batches.end_evaluation()
        self.batches.give_callbacks_back()

    def _begin_evaluation(self, agrees_on_buffers: bool = True) -> None:
        if agrees_on_buffers:
            self._checkpoints.before_update()  # Callbacks may swap weights for the evaluation.
        self.batches.begin_evaluation(agrees_on_buffers)

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``training_step``. This is a collective, like all steps."""
        return _compat.output_of_step(self.trainer, self.runner.train(args, kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``validation_step``."""
        return self.runner.evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``test_step``."""
        return self.runner.evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``predict_step``."""
        return self.runner.evaluate("predict_step", args, kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, in automatic and in manual optimization."""
        return self.runner.backward(closure_loss, optimizer, args, kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer``. Gradients are clipped by the norm of the whole model's gradients."""
        step = super().optimizer_step
        return self.runner.step_optimizer(closure, lambda closure: step(optimizer, closure, model, **kwargs))

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Return a context in which each rank adds up its own gradients, for Lightning's accumulation of gradients."""
        with self.runner.before_last_batch():
            yield

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a metric over the ranks that have a part of the batch."""
        if self._tracing is not None and self._tracing.is_active:
            return self._tracing.reduce(tensor)
        if group is None and self._groups is not None:
            group = self._groups.data_parallel
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the ranks that have a part of the batch, each part once.

        Args:
            tensor: This rank's tensor, of the same shape on all ranks.
            group: Process group to gather over; None, or the group of all processes, which
                ``LightningModule.all_gather`` passes by default: the ranks that have a part of the batch.
            sync_grads: Whether the gradient of the result flows back to every rank's ``tensor``.

        Returns:
            The tensors of all ranks, stacked along a new first dimension.
        """
        if self._tracing is not None and self._tracing.is_active:
            return self._tracing.all_gather(tensor, sync_grads)
        if group is None or group is dist.group.WORLD:
            group = None if self._groups is None else self._groups.data_parallel
        return super().all_gather(tensor, group, sync_grads)

    # Checkpoints

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
        self._run_checkpoints.postpone(restore)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict. Sharded parameters are DTensors; those of other stages are meta tensors."""
        return self._run_checkpoints.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by the parameters' full names.

        Sharded states are DTensors; the states of parameters that only other ranks have are on the meta device. This is
        a collective if ranks have different parameters.
        """
        return self._run_checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint as a directory to which every rank writes its part; in a fit, in the background."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__}.save_checkpoint takes no storage_options: it uses no CheckpointIO.")
        if not self._elastic.is_leader:
            return
        used = {name: value for name, value in self.settings.items() if value is not None}
        plain = {name: value if isinstance(value, str | int | float) else str(value) for name, value in used.items()}
        settings = {"strategy": self.strategy_name, **plain}
        self._run_checkpoints.save(checkpoint, filepath, self.batches.parts, settings)
        # Callbacks that average weights change them before the next step, which the strategy does not notice.
        if self.builder.has_averages:
            self._checkpoints.before_update()

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes, but not after a save, which begins on all ranks and ends for all or for none."""
        if name != "Trainer.save_checkpoint":
            super().barrier(name)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint after the saves that are under way have ended, unless the last of them has failed."""
        if self._elastic.is_leader:
            self._run_checkpoints.remove(filepath)

    def wait_for_checkpoints(self) -> None:
        """Wait until all requested checkpoints are written, so that they can be read or copied.

        Raises:
            CheckpointError: If the newest checkpoint could not be written.
        """
        self._checkpoints.finish()

    @override
    def what_was_saved(self) -> str:
        """Return a sentence on the newest checkpoint of a fit and on how to resume it; "" outside of a fit."""
        return self._run_checkpoints.what_was_saved()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint (a directory of any layout or a single file) into tensors that are sharded as this run's.

        Weights that only other ranks have are on the meta device.
        """
        if checkpoint_path is RUNNING_REPLICA:
            return self._elastic.load()
        return self._run_checkpoints.load(checkpoint_path, weights_only, self.batches.parts)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint that :meth:`load_checkpoint` read."""
        self._run_checkpoints.load_weights(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states of a checkpoint that :meth:`load_checkpoint` read."""
        self._run_checkpoints.load_optimizers(checkpoint)

    # The end of a run

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Announce to the other ranks that the run has failed on this rank, so that they do not wait for it.

        After Ctrl-C, rank 0 says what was saved.
        """
        self._run_checkpoints.report_exception(exception)

    @override
    def teardown(self) -> None:
        """Free gathered parameters and restore the module's own hooks; the module stays sharded and on its device."""
        self._checkpoints.close()
        self._elastic.leave()
        if self._runner is not None:
            self._runner.close()
        self._owners.release()
        self._restore_loggers()
        if self._batches is not None:
            self._batches.close()
        if self._parallel is not None:
            self._parallel.free()
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


MeshStrategy._written = written_arguments(MeshStrategy)
MeshStrategy.show_arguments()
