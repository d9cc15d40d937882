"""Define the base class of all strategies, which implements Lightning's interface of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.parallel_module import parallelized
from lightning_dist.parallelize import ParallelConfig, options_from
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.precision import MeshPrecision
from lightning_dist.plugins.strategies.arguments import (
    Argument,
    refuse_unknown_arguments,
    show_arguments,
    written_arguments,
)
from lightning_dist.plugins.strategies.checkpointed import AFTER_ERROR_S
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions
from lightning_dist.plugins.strategies.checks import (
    check_fit,
    check_run,
    refuse_what_cannot_work,
    warn_of_idle_arguments,
)
from lightning_dist.plugins.strategies.example_input import run_example
from lightning_dist.plugins.strategies.logged_runs import continue_runs
from lightning_dist.plugins.strategies.memory_report import MemoryReport
from lightning_dist.plugins.strategies.optimizer_steps import OptimizerStep
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.plugins.strategies.stepping import SteppingStrategy
from lightning_dist.plugins.strategies.steps.choice import make_steps
from lightning_dist.plugins.strategies.tuning import agree_on_trials, refuse_batch_size_finder
from lightning_dist.plugins.strategies.wrapped_hooks import OUTSIDE_OF_STEPS, WrappedHooks
from lightning_dist.run.after_error import check_that_all_ranks_failed
from lightning_dist.run.watchdog import record_collectives

__all__ = ["MeshStrategy"]


def _do_nothing() -> None:
    pass


def _is_ours(strategy: object) -> bool:
    return isinstance(strategy, MeshStrategy)


class MeshStrategy(SteppingStrategy):
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
            :class:`~lightning_dist.plugins.strategies.checkpointing.CheckpointOptions`.
        process_group_backend: Backend such as ``"nccl"`` or ``"gloo"``; None: the default for the device.
        timeout: The time for which ranks wait for each other in a collective; None: torch's default.
        options: Arguments of techniques, such as ``compression``, which the options in
            :data:`lightning_dist.parallelize.OPTIONS` define.

    Raises:
        ValueError: If an argument has none of its accepted values.
        TypeError: If an argument is unknown.
    """

    strategy_name: ClassVar[str] = "mesh"

    offers: ClassVar[frozenset[str]] = frozenset()
    """The axes whose sizes the strategy chooses, and other features; some arguments of techniques need them."""

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
        refuse_unknown_arguments(type(self), options, self._written, self.offers)
        config = ParallelConfig(units, options_from(options))
        super().__init__(
            config,
            reduce_dtype,
            optimizer_step=optimizer_step,
            checkpoint=checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            global_batch_size=global_batch_size,
            uneven_batches=uneven_batches,
            keep_data_order=keep_data_order,
        )
        self._hooks: WrappedHooks | None = None
        self._restore_loggers: Callable[[], None] = _do_nothing

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the constructor of a strategy show the arguments of techniques."""
        super().__init_subclass__(**kwargs)
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
        if "__init__" in vars(cls):
            shared = MeshStrategy._written
            own = {name: argument for name, argument in cls._written.items() if name not in shared}
            show_arguments(cls, own, shared, cls.offers)
        for derived in cls.__subclasses__():
            derived.show_arguments()

    @override
    def configure_launcher(self) -> None:
        """Check as well that the requested techniques work together."""
        super().configure_launcher()
        if isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin.use_device(self.root_device.type)
        check_run(self)

    @override
    def setup_environment(self) -> None:
        """Start the process group, build the mesh, and make sure that a fit can be stopped."""
        check_that_all_ranks_failed(AFTER_ERROR_S)
        for options in self._config.arguments.options:
            self._process_group_backend = options.backend(self._process_group_backend, self.root_device)
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, FaultTolerance) and callback.hang_timeout for callback in callbacks):
            record_collectives()
        super().setup_environment()
        refuse_batch_size_finder(self._trainer, self.layout, self._global_batch_size)
        agree_on_trials(self._trainer)
        if not any(isinstance(callback, FaultTolerance) for callback in callbacks):
            # Lightning keeps checkpoint callbacks last, so that they save the states that all others have updated.
            first_checkpoint = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(first_checkpoint, FaultTolerance())
        if self._trainer.state.fn == TrainerFn.FITTING:
            continue_runs(self._trainer, self.resumes_from)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Make the module parallel, then make its optimizers."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        refuse_what_cannot_work(self, trainer)
        check_fit(self, trainer)
        if self.layout.world_size > self.layout.dp_replicate:
            _compat.evaluate_without_inference_mode(trainer)
        is_new = parallelized(module) is None
        self._give_metrics_their_group(module)
        if is_new:
            warn_of_idle_arguments(self._config.arguments, self.layout)
            self._move_to_device(module)
        self._restore_loggers = _compat.log_graph_before_sharding(trainer, is_sharded=not is_new)
        self._parallel = self._parallelize(module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._parallelize_averages(trainer)
        self._restore_now()
        if is_fitting:
            _compat.agree_on_decisions(trainer)
            if self._config.arguments.lets_replicas_differ and self.layout.world_size == self.layout.dp_replicate:
                _compat.allow_skipped_steps(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting and not any(options.keeps_states_elsewhere for options in self._config.arguments.options):
            _compat.optimizers_to_device(self.optimizers, self.root_device)
        self._agree_on_batches()
        _compat.reduce_losses_of_finders(_is_ours)
        _compat.weigh_ranks_exactly(_is_ours)
        self._checkpoints.start(trainer)
        assert self._tracing is not None
        self._steps = make_steps(module, self._parallel, self.precision_plugin, self._tracing)
        _compat.set_timeout(self._timeout)  # Techniques and steps have created groups with torch's default timeout.
        self._steps.wait_before_changes(self._checkpoints.before_update)  # Weights may be copied into a checkpoint.
        batches = self._training_batches if is_fitting else None
        results = {} if batches is None else {"on_train_batch_start": batches.agreed_response}
        self._hooks = WrappedHooks(module, OUTSIDE_OF_STEPS, self._steps.around_hook, results)
        self._hooks.install(trainer)
        _compat.run_examples_by(run_example)
        if is_new:
            rank_zero_info(startup_table(self, self._parallel))
        self._memory = None
        if is_fitting:
            self._memory = MemoryReport(
                trainer, self._parallel, self.optimizers, self._config.arguments, self.layout, self.root_device
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that distinguish this run in a logger, besides the layout; None: not in use."""
        where = self._where_optimizers_step
        of_techniques = [options.settings(self.parallel) for options in self._config.arguments.options]
        settings = {name: value for own in of_techniques for name, value in own.items()}
        return {**settings, "optimizer_step": None if where == "auto" else where}

    @override
    def _settings_to_save(self) -> dict[str, Any]:
        used = {name: value for name, value in self.settings.items() if value is not None}
        plain = {name: value if isinstance(value, str | int | float) else str(value) for name, value in used.items()}
        return {"strategy": self.strategy_name, **plain}

    @override
    def teardown(self) -> None:
        """Free gathered parameters and restore the module's own hooks; the module stays sharded and on its device."""
        self._checkpoints.close()
        if self._hooks is not None:
            self._hooks.remove()
        self._release_optimizers()
        self._restore_loggers()
        self._restore_metrics()
        self._forget_evaluation()  # A failed evaluation has not ended itself.
        self._give_callbacks_back()
        if self._parallel is not None:
            self._parallel.free()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


MeshStrategy._written = written_arguments(MeshStrategy)
MeshStrategy.show_arguments()
