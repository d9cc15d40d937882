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

from lightning_dist.model.units import MIN_NUM_PARAMS
from lightning_dist.parallel_module import parallelized
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.plugins import _compat
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.precision import MeshPrecision
from lightning_dist.plugins.strategies.activations import (
    CheckpointingArgument,
    checkpointing_mode,
    refuse_tiling,
    tiling_config,
)
from lightning_dist.plugins.strategies.checkpointed import AFTER_ERROR_S
from lightning_dist.plugins.strategies.checkpointing import CheckpointOptions
from lightning_dist.plugins.strategies.checks import (
    refuse_step_in_backward,
    refuse_what_cannot_work,
    warn_of_idle_arguments,
)
from lightning_dist.plugins.strategies.compiling import (
    CompileArgument,
    compile_config,
    refuse_accumulation_in_graphs,
    refuse_cuda_graphs,
)
from lightning_dist.plugins.strategies.example_input import run_example
from lightning_dist.plugins.strategies.gpus import refuse_async_tensor_parallel
from lightning_dist.plugins.strategies.gradient_compression import (
    CompressionArgument,
    SyncArgument,
    compression_config,
    refuse_compression,
    refuse_manual_optimization,
    sync_config,
)
from lightning_dist.plugins.strategies.logged_runs import continue_runs
from lightning_dist.plugins.strategies.memory_report import MemoryReport
from lightning_dist.plugins.strategies.offloading import (
    backend_for_offload,
    offload_config,
    offloads_optimizer,
    refuse_offload,
)
from lightning_dist.plugins.strategies.optimizer_steps import OptimizerStep
from lightning_dist.plugins.strategies.run_settings import run_settings
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.plugins.strategies.stepping import SteppingStrategy
from lightning_dist.plugins.strategies.steps.choice import make_steps
from lightning_dist.plugins.strategies.tuning import agree_on_trials, refuse_batch_size_finder
from lightning_dist.plugins.strategies.unknown_arguments import refuse_unknown_arguments
from lightning_dist.plugins.strategies.wrapped_hooks import OUTSIDE_OF_STEPS, WrappedHooks
from lightning_dist.run.after_error import check_that_all_ranks_failed
from lightning_dist.run.watchdog import record_collectives
from lightning_dist.techniques.sharding import ShardingConfig

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
        min_num_params: Number of parameters from which a module outside the blocks is sharded as one unit.
        reshard_after_forward: True: a block's gathered parameters are freed after its forward, and gathered again for
            its backward, which takes the least memory. False: they are kept, which saves a gather. A number: they are
            kept sharded over this many ranks.
        reduce_dtype: Dtype in which gradients are reduced (``"float32"``, ``"bfloat16"``, ``"float64"``). None:
            float32, or the parameters' dtype with 64-true.
        activation_checkpointing: Which activations of blocks are kept for the backward. ``"none"`` (or False): all of
            them. ``"full"`` (or True): none; a block runs again in the backward. ``"selective"``: the results of
            attention and of every second matrix product; the others are computed again. ``{"every": k}``: those of all
            but every ``k``-th block. ``{"budget": b}``: those of at most the fraction ``b`` of the blocks, spread
            evenly; the other blocks run again. ``"offload"``: all of them, in the memory of the CPU.
        tiled_mlp: Number of tokens of a sequence that the MLPs of blocks compute at a time, and again in the backward,
            so that long sequences take less memory. None: all tokens at once.
        tiled_loss: Number of tokens of a sequence for which logits and ``F.cross_entropy`` are computed at a time, and
            again in the backward, so that logits are never whole. None: all tokens at once.
        compile: Whether each block is compiled by ``torch.compile``; a string names the backend, and a mapping such as
            ``{"mode": "max-autotune-no-cudagraphs"}`` the mode. The modes ``"reduce-overhead"`` and ``"max-autotune"``
            run blocks as CUDA graphs, if nothing is sharded, split, in stages or accumulated.
        direct_collectives: Whether to all-gather and reduce-scatter in one round, in which each rank exchanges data
            with every other one. None: if the backend is gloo, whose own collectives take more rounds or more bytes.
        check_replicas_every_n_steps: Number of optimizer steps after which the replicas' weights are compared bit by
            bit; a difference raises an error. None: they are never compared.
        compression: How gradients are compressed that replicas send each other: the name of a compressor (``bf16``,
            ``fp16``, ``fp8``, ``int8``, ``powersgd``, ``topk``), or a
            :class:`~lightning_dist.techniques.compression.Compressor`. None or ``"none"``: they are not compressed.
        sync: How replicas are synchronized that train on their own for a number of steps, instead of reducing their
            gradients in every step: :class:`~lightning_dist.techniques.compression.LocalSGD` or
            :class:`~lightning_dist.techniques.compression.DiLoCo`. None: gradients are reduced.
        offload: What is kept in the memory of the CPU instead of the device's. ``"params"``: shards of parameters and
            gradients. ``"optimizer"``: the states of optimizers, which step on the CPU. ``"both"``: all of these. None:
            nothing.
        offload_folder: Folder on a disk of each node in which ``offload`` keeps parameters and states, instead of the
            memory of the CPU. This saves memory on the CPU as well.
        step_in_backward: Whether optimizers update sharded parameters while the backward runs, as soon as their
            gradients are reduced, so that a rank never holds all gradients.
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

    Raises:
        ValueError: If an argument has none of its accepted values.
        TypeError: If an argument is unknown.
    """

    strategy_name: ClassVar[str] = "mesh"

    @refuse_unknown_arguments
    def __init__(
        self,
        units: list[str] | None = None,
        min_num_params: int = MIN_NUM_PARAMS,
        reshard_after_forward: bool | int = True,
        reduce_dtype: str | None = None,
        activation_checkpointing: CheckpointingArgument = False,
        tiled_mlp: int | None = None,
        tiled_loss: int | None = None,
        compile: CompileArgument = False,
        direct_collectives: bool | None = None,
        check_replicas_every_n_steps: int | None = None,
        compression: CompressionArgument = None,
        sync: SyncArgument = None,
        offload: str | None = None,
        offload_folder: str | None = None,
        step_in_backward: bool = False,
        optimizer_step: OptimizerStep = "auto",
        global_batch_size: int | None = None,
        uneven_batches: str = "stop",
        keep_data_order: bool = True,
        checkpoint: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if check_replicas_every_n_steps is not None and check_replicas_every_n_steps < 1:
            raise ValueError(
                f"check_replicas_every_n_steps={check_replicas_every_n_steps} must be at least 1, or None for never."
            )
        config = ParallelConfig(
            units=units,
            min_num_params=min_num_params,
            sharding=ShardingConfig(reshard_after_forward=reshard_after_forward, direct_collectives=direct_collectives),
            activation_checkpointing=checkpointing_mode(activation_checkpointing),
            tiling=tiling_config(tiled_mlp, tiled_loss),
            compilation=compile_config(compile),
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            compression=compression_config(compression),
            sync=sync_config(sync),
            offload=offload_config(offload, offload_folder),
            step_in_backward=step_in_backward,
        )
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

    @override
    def configure_launcher(self) -> None:
        """Check as well that the requested techniques work together."""
        super().configure_launcher()
        if isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin.use_device(self.root_device.type)
        refuse_compression(self._config, self.layout, self.precision_plugin, self.strategy_name)
        refuse_tiling(self._config.tiling, self.layout, self.strategy_name)
        refuse_cuda_graphs(self._config, self.layout, self.root_device.type)
        is_async = self._config.tensor_parallel.is_async
        refuse_async_tensor_parallel(is_async, self.layout, self.root_device.type, self.num_processes)
        refuse_offload(self._config.offload, self.layout, self.precision_plugin, self.strategy_name)

    @override
    def setup_environment(self) -> None:
        """Start the process group, build the mesh, and make sure that a fit can be stopped."""
        check_that_all_ranks_failed(AFTER_ERROR_S)
        self._process_group_backend = backend_for_offload(
            self._config.offload, self._process_group_backend, self.root_device
        )
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
        refuse_manual_optimization(self._config, module)
        refuse_step_in_backward(self._config, self.layout, trainer)
        refuse_accumulation_in_graphs(self._config, trainer)
        if self.layout.world_size > self.layout.dp_replicate:
            _compat.evaluate_without_inference_mode(trainer)
        is_new = parallelized(module) is None
        self._give_metrics_their_group(module)
        if is_new:
            warn_of_idle_arguments(self._config, self.layout)
            self._move_to_device(module)
        self._restore_loggers = _compat.log_graph_before_sharding(trainer, is_sharded=not is_new)
        self._parallel = self._parallelize(module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._parallelize_averages(trainer)
        self._restore_now()
        if is_fitting:
            _compat.agree_on_decisions(trainer)
            if self._config.sync is not None and self.layout.world_size == self.layout.dp_replicate:
                _compat.allow_skipped_steps(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting and not offloads_optimizer(self._config.offload):
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
                trainer, self._parallel, self.optimizers, self._config, self.layout, self.root_device
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that distinguish this run in a logger, besides the layout; None: not in use."""
        where = self._where_optimizers_step
        return {**run_settings(self._config, self.parallel), "optimizer_step": None if where == "auto" else where}

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
