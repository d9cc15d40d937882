"""Define the base class of all strategies, which implements Lightning's interface of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist._compat import convert
from lightning_dist.after_error import check_that_all_ranks_failed
from lightning_dist.consensus import go_on
from lightning_dist.deferred_init import deferred_init
from lightning_dist.local_step import LocalStep
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.parallelize import ParallelConfig, parallelize
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.precision import (
    Float8Precision,
    MeshPrecision,
    PrecisionPolicy,
    agree_on_overflows,
    check_reduce_dtype,
    precision_policy,
    refuse_uncomputable,
    use_precision_again,
)
from lightning_dist.plugins.strategies.activations import CheckpointingArgument, checkpointing_mode
from lightning_dist.plugins.strategies.checkpointed import AFTER_ERROR_S, CheckpointedStrategy
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions
from lightning_dist.plugins.strategies.checks import (
    check_optimizers,
    explaining_optimizer_errors,
    refuse_step_in_backward,
    refuse_what_cannot_work,
    warn_of_idle_arguments,
)
from lightning_dist.plugins.strategies.example_input import run_example
from lightning_dist.plugins.strategies.gradient_compression import (
    CompressionArgument,
    SyncArgument,
    compression_config,
    refuse_compression,
    refuse_manual_optimization,
    sync_config,
    with_loss_scaling,
)
from lightning_dist.plugins.strategies.logged_runs import continue_runs
from lightning_dist.plugins.strategies.memory_report import MemoryReport
from lightning_dist.plugins.strategies.offloading import (
    backend_for_offload,
    offload_config,
    offloads_optimizer,
    refuse_offload,
)
from lightning_dist.plugins.strategies.run_settings import run_settings
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.plugins.strategies.steps.base import Steps, begins_accumulation
from lightning_dist.plugins.strategies.steps.choice import complete_config, make_steps, refuse_other_config
from lightning_dist.plugins.strategies.wrapped_hooks import OUTSIDE_OF_STEPS, WrappedHooks
from lightning_dist.sharding import ShardingConfig
from lightning_dist.tensor_state import is_uninitialized
from lightning_dist.units import MIN_NUM_PARAMS

__all__ = ["MeshStrategy"]


def _do_nothing() -> None:
    pass


class MeshStrategy(CheckpointedStrategy):
    """Spread an ordinary LightningModule over a device mesh.

    The strategies that users choose by name derive from this class, and choose the axes of the mesh.

    Args:
        units: Class names of the model's repeated blocks, each of which is sharded as one unit. None: Hugging Face's
            ``_no_split_modules``, else the class that repeats in the model's containers.
        min_num_params: Number of parameters from which a module outside the blocks is sharded as one unit.
        reshard_after_forward: True: a block's gathered parameters are freed after its forward, and gathered again for
            its backward, which takes the least memory. False: they are kept, which saves a gather. A number: they are
            kept sharded over this many ranks.
        reduce_dtype: Dtype in which gradients are reduced (``"float32"``, ``"bfloat16"``, ``"float64"``). None:
            float32, or the parameters' dtype with 64-true.
        activation_checkpointing: Which activations of blocks are kept for the backward. ``"none"`` (or False): all of
            them. ``"full"`` (or True): none; a block runs again in the backward. ``"selective"``: the results of
            attention and of every second matrix product; the others are computed again. ``{"every": k}``: those of all
            but every ``k``-th block. ``{"budget": b}``: those of so many blocks that the fraction ``b`` of the
            activations is kept. ``"offload"``: all of them, in the memory of the CPU.
        compile: Whether each block is compiled by ``torch.compile``; a string names the backend.
        direct_collectives: Whether to all-gather and reduce-scatter in one round, in which each rank exchanges data
            with every other one. None: if the backend is gloo, whose own collectives take more rounds or more bytes.
        check_replicas_every_n_steps: Number of optimizer steps after which the replicas' weights are compared bit by
            bit; a difference raises an error. None: they are never compared.
        compression: How gradients are compressed that replicas send each other: the name of a compressor (``bf16``,
            ``fp16``, ``fp8``, ``int8``, ``powersgd``, ``topk``), or a
            :class:`~lightning_dist.compression.Compressor`. None or ``"none"``: they are not compressed.
        sync: How replicas are synchronized that train on their own for a number of steps, instead of reducing their
            gradients in every step: :class:`~lightning_dist.compression.LocalSGD` or
            :class:`~lightning_dist.compression.DiLoCo`. None: gradients are reduced.
        offload: What is kept in the memory of the CPU instead of the device's. ``"params"``: shards of parameters and
            gradients. ``"optimizer"``: the states of optimizers, which step on the CPU. ``"both"``: all of these. None:
            nothing.
        offload_folder: Folder on a disk of each node in which ``offload`` keeps parameters and states, instead of the
            memory of the CPU. This saves memory on the CPU as well.
        step_in_backward: Whether optimizers update sharded parameters while the backward runs, as soon as their
            gradients are reduced, so that a rank never holds all gradients.
        global_batch_size: Number of samples in an optimizer step over all ranks. The batch size of training loaders is
            set to this number divided by those of data-parallel ranks and of accumulated batches. None: loaders keep
            their batch sizes, so that a step takes more samples on more ranks.
        checkpoint: Options for saving and loading checkpoints: the arguments of
            :class:`~lightning_dist.plugins.strategies.checkpointing.CheckpointOptions`.
        process_group_backend: Backend such as ``"nccl"`` or ``"gloo"``; None: the default for the device.
        timeout: The time for which ranks wait for each other in a collective; None: torch's default.
    """

    strategy_name: ClassVar[str] = "mesh"

    def __init__(
        self,
        units: list[str] | None = None,
        min_num_params: int = MIN_NUM_PARAMS,
        reshard_after_forward: bool | int = True,
        reduce_dtype: str | None = None,
        activation_checkpointing: CheckpointingArgument = False,
        compile: bool | str = False,
        direct_collectives: bool | None = None,
        check_replicas_every_n_steps: int | None = None,
        compression: CompressionArgument = None,
        sync: SyncArgument = None,
        offload: str | None = None,
        offload_folder: str | None = None,
        step_in_backward: bool = False,
        global_batch_size: int | None = None,
        checkpoint: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(checkpoint, process_group_backend, timeout, global_batch_size)
        if check_replicas_every_n_steps is not None and check_replicas_every_n_steps < 1:
            raise ValueError(
                f"check_replicas_every_n_steps={check_replicas_every_n_steps} must be at least 1, or None for never."
            )
        check_reduce_dtype(reduce_dtype)
        self._config = ParallelConfig(
            units=units,
            min_num_params=min_num_params,
            sharding=ShardingConfig(reshard_after_forward=reshard_after_forward, direct_collectives=direct_collectives),
            activation_checkpointing=checkpointing_mode(activation_checkpointing),
            compile_backend="inductor" if compile is True else compile or None,
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            compression=compression_config(compression),
            sync=sync_config(sync),
            offload=offload_config(offload, offload_folder),
            step_in_backward=step_in_backward,
        )
        self._reduce_dtype = reduce_dtype
        self._steps: Steps | None = None
        self._memory: MemoryReport | None = None
        self._hooks: WrappedHooks | None = None
        self._local_steps: list[LocalStep] = []
        self._undo_optimizers: Callable[[], None] = _do_nothing
        self._restore_loggers: Callable[[], None] = _do_nothing

    @property
    def config(self) -> ParallelConfig:
        """Return the engine's configuration that the arguments of the strategy ask for."""
        return self._config

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

    @override
    def configure_launcher(self) -> None:
        """Check as well that the requested techniques work together."""
        super().configure_launcher()
        if isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin.use_device(self.root_device.type)
        refuse_compression(self._config, self.layout, self.precision_plugin, self.strategy_name)
        refuse_offload(self._config.offload, self.layout, self.precision_plugin, self.strategy_name)

    @override
    def setup_environment(self) -> None:
        """Start the process group, build the mesh, and make sure that a fit can be stopped."""
        check_that_all_ranks_failed(AFTER_ERROR_S)
        self._process_group_backend = backend_for_offload(
            self._config.offload, self._process_group_backend, self.root_device
        )
        super().setup_environment()
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, FaultTolerance) for callback in callbacks):
            # Lightning keeps checkpoint callbacks last, so that they save the states that all others have updated.
            first_checkpoint = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(first_checkpoint, FaultTolerance())
        if self._trainer.state.fn == TrainerFn.FITTING:
            continue_runs(self._trainer, self.resumes_from)

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
    def setup(self, trainer: Trainer) -> None:
        """Make the module parallel, then make its optimizers."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        refuse_what_cannot_work(self, trainer)
        refuse_manual_optimization(self._config, module)
        refuse_step_in_backward(self._config, self.layout, trainer)
        is_new = parallelized(module) is None
        self._give_metrics_their_group(module)
        if is_new:
            warn_of_idle_arguments(self._config, self.layout)
            self._move_to_device(module)
        self._restore_loggers = _compat.log_graph_before_sharding(trainer, is_sharded=not is_new)
        self._parallel = self._parallelize(module)
        _compat.set_timeout(self._timeout)  # Techniques have created groups with torch's default timeout.
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        for callback in trainer.callbacks if is_fitting else ():  # type: ignore[attr-defined]
            average = _compat.average_model(callback)
            if average is not None:
                if self._config.sync is not None:
                    raise MisconfigurationException(
                        f"{type(callback).__name__} with sync={self._config.sync.method}: each replica would average"
                        " its own weights. Remove one of the two."
                    )
                self._has_averages = True
                self._parallelize(cast(LightningModule, average.module), copied=self._parallel)
        self._restore_now()
        if is_fitting:
            _compat.agree_on_decisions(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting and not offloads_optimizer(self._config.offload):
            _compat.optimizers_to_device(self.optimizers, self.root_device)
        self._checkpoints.start(trainer)
        assert self._tracing is not None
        self._steps = make_steps(module, self._parallel, self.precision_plugin, self._tracing)
        self._steps.wait_before_changes(self._checkpoints.before_update)  # Weights may be copied into a checkpoint.
        self._hooks = WrappedHooks(module, OUTSIDE_OF_STEPS, self._steps.around_hook)
        self._hooks.install(trainer)
        _compat.run_examples_by(run_example)
        if is_new:
            rank_zero_info(startup_table(self, self._parallel))
        self._memory = None
        if is_fitting:
            self._memory = MemoryReport(
                trainer, self._parallel, self.optimizers, self._config, self.layout, self.root_device
            )

    def _parallelize(self, module: LightningModule, copied: ParallelModule | None = None) -> ParallelModule:
        """Make ``module`` parallel, unless an earlier Trainer has done so. This is a collective over all processes.

        Args:
            module: The user's module, or a copy of it.
            copied: The parallel module whose module ``module`` is a copy of; None: it is not a copy.
        """
        existing = parallelized(module)
        if existing is not None:
            wanted = self.layout.sharding_mesh(self.mesh, self._config.sync is not None)
            if existing.mesh != wanted:
                raise MisconfigurationException(
                    f"This {type(module).__name__} is sharded over {existing.mesh} by an earlier Trainer, and cannot be"
                    f" sharded over {wanted} as well. Make a new one, and load the weights from a checkpoint."
                )
            config = replace(self._config, keep_fp32=self.precision_policy.keep_fp32)
            refuse_other_config(existing, config, self.layout)
            use_precision_again(module, self.precision_plugin)
            return existing
        if self.layer_sync is not None:
            self.layer_sync.apply(module)
        if isinstance(self.precision_plugin, Float8Precision):
            self.precision_plugin.prepare(self.root_device, self.layout)
        policy = self.precision_policy
        refuse_uncomputable(policy, str(self.precision_plugin.precision), self.root_device)
        is_deferred = any(is_uninitialized(param) for param in module.parameters())
        with deferred_init(self.root_device) if is_deferred else nullcontext():
            self.precision_plugin.convert_module(module)
        self._move_to_device(module)
        sharding = replace(
            self._config.sharding,
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            gather_as=policy.gather_as,
        )
        assert self._tracing is not None
        config = complete_config(self._config, self.layout, module, self._trainer, self._tracing, copied)
        config = replace(config, sharding=sharding, keep_fp32=policy.keep_fp32)
        config = with_loss_scaling(config, self.precision_plugin)
        if copied is not None:  # A copy, such as an average of the weights, gets no gradients.
            config = replace(config, compression=None, sync=None)
        return parallelize(module, self.layout, self.mesh, config, self._stage_to_stage_group, self._context_group)

    @override
    def model_to_device(self) -> None:
        """Move the module to this rank's device, except tensors that ``configure_model`` left on the meta device."""
        assert self.lightning_module is not None
        self._move_to_device(self.lightning_module)

    def _move_to_device(self, module: LightningModule) -> None:
        convert(module, lambda tensor: tensor if is_uninitialized(tensor) else tensor.to(self.root_device))

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers of the sharded parameters.

        Raises:
            ValueError: If an optimizer holds parameters that are not the module's.
            MisconfigurationException: If an optimizer cannot work on shards.
        """
        with explaining_optimizer_errors(type(self).__name__):
            super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        check_optimizers(self.optimizers, self.lightning_module, type(self).__name__)
        self._local_steps = [LocalStep(optimizer) for optimizer in self.optimizers]
        self._undo_optimizers = self.parallel.prepare_optimizers(self.optimizers)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what runs are compared by in a logger, besides the layout; None stands for what is not in use."""
        return run_settings(self._config, self.parallel)

    @property
    def steps(self) -> Steps:
        """Return the object that runs the module's steps; it exists once the strategy is set up."""
        assert self._steps is not None
        return self._steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``training_step``. This is a collective, like all steps."""
        assert self.lightning_module is not None
        go_on()
        self._checkpoints.before_step()
        if not self.lightning_module.automatic_optimization:
            self._checkpoints.before_update()
        self._check_batch("training_step", args, kwargs)
        self.parallel.before_training_step(begins_accumulation(self._trainer))
        assert self._memory is not None
        return self._memory.training_step(partial(self.steps.train, args, kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``validation_step``."""
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``test_step``."""
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``predict_step``."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        self._check_batch(name, args, kwargs)
        return cast(STEP_OUTPUT, self.precision_plugin.convert_output(self.steps.evaluate(name, args, kwargs)))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, in automatic and in manual optimization."""
        assert self._memory is not None
        with self._memory.explained():
            return self.steps.backward(closure_loss, optimizer, args, kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer``. Gradients are clipped by the norm of the whole model's gradients."""

        def closure_then_wait() -> Any:
            output = closure()
            self._checkpoints.before_update()
            self.parallel.before_optimizer_step()
            memory.before_optimizer_step()
            return output

        assert self.lightning_module is not None
        assert self._memory is not None
        memory = self._memory
        if not self.lightning_module.automatic_optimization:  # The optimizer may ignore the closure, which is empty.
            self.parallel.before_optimizer_step()
        try:
            with memory.explained(), self.steps.outside_of_hooks(), _compat.total_norms(self.parallel.total_norm):
                output = super().optimizer_step(optimizer, closure_then_wait, model, **kwargs)
        finally:
            for local_step in self._local_steps:
                local_step.restore()
        self.parallel.after_optimizer_step()
        memory.after_optimizer_step()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Return a context in which each rank adds up its own gradients, for Lightning's accumulation of gradients."""
        self.parallel.set_gradient_sync(False)
        try:
            yield
        finally:
            self.parallel.set_gradient_sync(True)

    @override
    def teardown(self) -> None:
        """Free gathered parameters and restore the module's own hooks; the module stays sharded and on its device."""
        self._checkpoints.close()
        if self._hooks is not None:
            self._hooks.remove()
        for local_step in self._local_steps:
            local_step.remove()
        self._local_steps = []
        self._undo_optimizers()
        self._undo_optimizers = _do_nothing
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
