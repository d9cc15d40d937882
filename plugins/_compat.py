"""Wrap the plugins' uses of Lightning's private API, and say what could replace each; tested with Lightning 2.6."""

import math
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, grads
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning_utilities.core.rank_zero import rank_zero_only as _utils_rank_zero_only
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics import metric as metric_module

from lightning_dist._compat import process_groups
from lightning_dist.checkpoint import is_sharded_checkpoint, read_whole
from lightning_dist.consensus import raise_on_all_ranks
from lightning_dist.rendezvous import fresh_store
from lightning_dist.tensor_state import is_remote, is_uninitialized


def logging_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs the current batch's metrics.

    ``trainer.global_step`` counts every optimizer's steps, so that two optimizers advance it by two per batch; curves
    over it would not line up with those of ``self.log``. Replaceable by a public property of the Trainer, which
    LearningRateMonitor would use too.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def observe_fetching(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around every wait for a training batch, from the start of the next epoch on.

    Replaceable by a hook around the fetching of a batch. A profiler could observe it, but would slow down every other
    action too.
    """
    loop = trainer.fit_loop.epoch_loop
    on_before_fetch, on_after_fetch = loop._on_before_fetch, loop._on_after_fetch

    def observed_before() -> None:
        before()
        on_before_fetch()

    def observed_after() -> None:
        on_after_fetch()
        after()

    loop._on_before_fetch, loop._on_after_fetch = observed_before, observed_after  # type: ignore[method-assign]


def reduce_across_processes(
    value: torch.Tensor, group: torch.distributed.ProcessGroup | None, reduce_op: ReduceOp | str | None
) -> torch.Tensor:
    """Reduce ``value`` over ``group`` as Lightning's own strategies do.

    Replaceable by a public ``reduce`` in Fabric.
    """
    return _sync_ddp_if_available(value, group, reduce_op=reduce_op)


def init_process_group(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> str:
    """Start torch.distributed as Lightning's own strategies do, and return the backend.

    Replaceable by a base class in Lightning for strategies that run one process per device.
    """
    reset_seed()
    backend = backend or _get_default_process_group_backend_for_device(device)
    rank, world_size = environment.global_rank(), environment.world_size()
    how: dict[str, Any] = {"timeout": timeout, "device_id": device if device.type != "cpu" else None}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        patience = timeout or default_pg_timeout
        shared = dist.TCPStore(
            environment.main_address, environment.main_port, world_size, is_master=False, timeout=patience
        )
        how["store"] = fresh_store(shared, rank, world_size, patience)
    _init_dist_connection(environment, backend, rank, world_size, **how)
    return backend


def set_timeout(timeout: timedelta | None) -> None:
    """Set the timeout of all process groups of this rank; None leaves them as they are.

    A device mesh creates its groups with torch's default timeout, whatever timeout the group of all processes has.
    Replaceable by a ``timeout`` argument of ``init_device_mesh``.
    """
    if timeout is None:
        return
    with warnings.catch_warnings():  # torch warns of backends without a timeout, such as a debugging wrapper.
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        for group in process_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def subprocess_launcher(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> _Launcher:
    """Return the launcher that starts this script again for every local rank but the first."""
    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


def set_rank_zero(global_rank: int) -> None:
    """Set the rank that each of Lightning's two ``rank_zero_only`` decorators compares with 0."""
    for decorator in (rank_zero_only, _utils_rank_zero_only):
        vars(decorator)["rank"] = global_rank


LINK_CHECKPOINT = "_link_checkpoint"
"""Name of the method of ModelCheckpoint that links its last checkpoint, assuming that this has been written."""


def read_checkpoint_directories() -> None:
    """Make ``load_from_checkpoint`` accept a checkpoint directory. Calling this again is safe.

    Replaceable by a registry of formats in Lightning, or by ``load_from_checkpoint`` using a CheckpointIO.
    """
    load = saving.pl_load
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_file_or_directory(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | os.PathLike) and is_sharded_checkpoint(os.fspath(path_or_url)):
            return read_whole(os.fspath(path_or_url), map_location, weights_only is not False)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    saving.pl_load = load_file_or_directory


def compute_gradient_norms_of_shards() -> None:
    """Make Lightning's ``grad_norm`` accept sharded modules, on which its ``torch.tensor(norms)`` does not work.

    The code of the function is replaced, because users may have imported the function before this package. Replaceable
    by ``torch.stack`` in Lightning's function.
    """

    def grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
        from lightning_dist.plugins.strategies.gradients import gradient_norms

        return gradient_norms(module, norm_type, group_separator)

    grads.grad_norm.__code__ = grad_norm.__code__


def log_graph_before_sharding(trainer: Trainer, is_sharded: bool) -> Callable[[], None]:
    """Let loggers with ``log_graph=True`` run the module on rank 0 now, before it is sharded.

    Lightning lets them do so after ``setup``, when no rank can run the module alone. If the module is sharded already,
    or has parameters on the meta device, a warning is issued instead. Replaceable by a hook of the strategy around
    Lightning's call. This is a collective over all processes if a graph is logged.

    Args:
        trainer: The Trainer that is about to run the module.
        is_sharded: Whether the module is sharded already, by an earlier run.

    Returns:
        A function that restores the loggers' own ``log_graph``, which is replaced by one that does nothing until then.
    """
    loggers = [logger for logger in trainer.loggers if getattr(logger, "_log_graph", False)]
    module = trainer.lightning_module
    if loggers and (is_sharded or any(is_uninitialized(param) for param in module.parameters())):
        rank_zero_warn("log_graph=True has no effect: the module is sharded, and no rank can run it alone.")
    elif loggers:
        with raise_on_all_ranks("logging the graph (log_graph=True)"):
            for logger in loggers:
                logger.log_graph(module)
    for logger in loggers:
        vars(logger)["log_graph"] = lambda *args, **kwargs: None

    def undo() -> None:
        for logger in loggers:
            vars(logger).pop("log_graph", None)

    return undo


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set ``module.device_mesh`` as Lightning's own ModelParallelStrategy does. Replaceable by a public setter."""
    module._device_mesh = mesh


def average_model(callback: Callback) -> AveragedModel | None:
    """Return the averaged model of a ``WeightAveraging`` callback; None for other callbacks.

    Replaceable by a public property of the callback.
    """
    return callback._average_model if isinstance(callback, WeightAveraging) else None


def changes_accumulation(trainer: Trainer) -> bool:
    """Return whether ``accumulate_grad_batches`` changes during the fit.

    Replaceable by a public property of the Trainer.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)


def scheduled_accumulation(trainer: Trainer, epoch: int) -> int:
    """Return the number of batches that a :class:`GradientAccumulationScheduler` accumulates in ``epoch``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    scheduler = next(callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler))
    return scheduler.get_accumulate_grad_batches(epoch)


def agree_on_decisions(trainer: Trainer) -> None:
    """Make all ranks take those decisions of the first rank that Lightning lets each rank take by its own values.

    Schedulers of learning rates may monitor a metric that is logged without ``sync_dist``, but shards of one weight
    must not be trained with different rates. A ``val_check_interval`` in seconds is measured by each rank's own clock.
    Replaceable by hooks for both.
    """
    loop = trainer.fit_loop.epoch_loop

    def monitored(key: str) -> Any:
        value = type(loop)._get_monitor_value(loop, key)
        agreed: float | None = trainer.strategy.broadcast(None if value is None else float(value))
        if isinstance(value, torch.Tensor) and agreed is not None:
            return torch.as_tensor(agreed, dtype=value.dtype, device=value.device)
        return agreed

    def validates_now(data_fetcher: Any) -> bool:
        decision: bool = trainer.strategy.broadcast(type(loop)._should_check_val_fx(loop, data_fetcher))
        return decision

    vars(loop)["_get_monitor_value"] = monitored
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        vars(loop)["_should_check_val_fx"] = validates_now


def mode_of_loaders(trainer: Trainer) -> str | None:
    """Return how the training loaders of a fit are combined, such as ``"max_size_cycle"``; None if there are none yet.

    Replaceable by a public property of the ``CombinedLoader``.
    """
    loaders = trainer.fit_loop._combined_loader
    return None if loaders is None else loaders._mode


def leave_signals_alone(trainer: Trainer) -> None:
    """Keep Lightning from handling signals in this run, because its handler deadlocks if only one rank gets a SIGTERM.

    Replaceable by a way to give a Trainer another handler.
    """
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None


def requeue_signal(trainer: Trainer) -> int | None:
    """Return the signal after which Lightning would let SLURM requeue this job; None if it would not."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def path_after_requeue(trainer: Trainer) -> str:
    """Return the path at which Lightning looks for a checkpoint after SLURM has requeued the job."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def before_every_batch(trainer: Trainer, name: str, function: Callable[[], None]) -> None:
    """Call ``function`` before every training batch is fetched.

    Replaceable by a hook at this place: ``on_train_batch_start`` runs after the batch has been created, which may have
    drawn random numbers.

    Args:
        trainer: The Trainer of the fit.
        name: Name of the function; a later call for ``trainer`` with the same name replaces it.
        function: The function.
    """
    loop = trainer.fit_loop.epoch_loop
    functions: dict[str, Callable[[], None]] = getattr(vars(loop).get("advance"), "functions", {})
    functions[name] = function

    def advance(data_fetcher: Any) -> None:
        for before in functions.values():
            before()
        type(loop).advance(loop, data_fetcher)

    advance.functions = functions  # type: ignore[attr-defined]
    vars(loop)["advance"] = advance


def _known_batches(max_batches: list[int | float], loaders: CombinedLoader | None) -> list[float]:
    """Return the numbers of batches, or infinity for loaders of unknown length, which may have fewer than the limit."""
    flattened = [] if loaders is None else loaders.flattened
    if len(flattened) != len(max_batches):
        return [float(number) for number in max_batches]
    return [
        math.inf if number and sized_len(loader) is None else float(number)
        for number, loader in zip(max_batches, flattened, strict=True)
    ]


def validates_alike(trainer: Trainer) -> bool:
    """Return whether all ranks have the same, known numbers of validation batches.

    This is a collective over all processes.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    batches = _known_batches(loop.max_batches, loop._combined_loader)
    extremes = torch.tensor([*batches, *(-number for number in batches)], device=trainer.strategy.root_device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return bool((extremes[: len(batches)] == -extremes[len(batches) :]).all()) and all(map(math.isfinite, batches))


def num_evaluation_batches(trainer: Trainer) -> list[int | float]:
    """Return this rank's number of batches of each loader in the evaluation or prediction that begins.

    It is infinite for a loader whose length is unknown. Replaceable by public properties of the Trainer for all of its
    loops.
    """
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return list(_known_batches(loop.max_batches, loop._combined_loader))


def before_reducing_evaluation(trainer: Trainer, function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` after the last batch of each loader of an evaluation, before logged values are reduced.

    In a prediction it is called once, after all loaders. Replaceable by a hook at this place: Lightning's first hook
    runs after the logged values have been reduced.

    Args:
        trainer: The Trainer whose evaluation or prediction begins.
        function: The function to call.

    Returns:
        A function that stops these calls.
    """
    loop: Any = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    name = "on_run_end" if trainer.predicting else "_store_dataloader_outputs"

    def observed() -> Any:
        function()
        return getattr(type(loop), name)(loop)

    vars(loop)[name] = observed
    return lambda: vars(loop).pop(name, None)


def put_training_weights_back(trainer: Trainer) -> None:
    """Undo the swap of weights that averaging callbacks have made for the running validation."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            callback.on_validation_epoch_end(trainer, trainer.lightning_module)


def let_children_exit(trainer: Trainer) -> None:
    """Keep Lightning's launcher from killing this process when the processes that it launched exit with an error code.

    Replaceable by a launcher with an option for this.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        launcher.procs.clear()


def intercept_checkpoint_paths(
    strategy: type,
    choose: Callable[[Trainer, Any, Callable[[], Any]], Any],
    resume: Callable[[Trainer, Any, Callable[[Any], None]], None],
    postpone: Callable[[Trainer, Callable[[], None]], None],
) -> None:
    """Change how Trainers with strategies of a given class resolve and load ``ckpt_path``; calling this again is safe.

    Replaceable by Lightning telling the strategy the user's ``ckpt_path``, and not only the path derived from it.

    Args:
        strategy: Class of the strategies to which this applies; with others, ``ckpt_path="auto"`` is refused.
        choose: Function that returns the path to load. Its arguments are the Trainer, the user's ``ckpt_path`` and a
            function that returns the path that Lightning derives from it.
        resume: Function that loads a checkpoint. Its arguments are the Trainer, the value that ``choose`` returned, and
            a function that reads the path that it is given, or nothing for None.
        postpone: Function that is given the Trainer and a function that restores the weights, the data module and the
            callbacks, and that calls the latter when the strategy is ready. Lightning would call it before the
            strategy's ``setup``, or else after ``on_fit_start``, when callbacks already need their states.
    """
    connector = _CheckpointConnector
    if hasattr(connector._parse_ckpt_path, "__wrapped__"):
        return
    parse_ckpt_path, resume_start = connector._parse_ckpt_path, connector.resume_start
    restore_modules_and_callbacks = connector._restore_modules_and_callbacks

    @wraps(parse_ckpt_path)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.trainer.strategy, strategy):
            return choose(self.trainer, ckpt_path, lambda: parse_ckpt_path(self, state_fn, ckpt_path, *args, **kwargs))
        if ckpt_path == "auto":
            raise MisconfigurationException(
                "ckpt_path='auto' works only with lightning-dist's strategies, and not with "
                f"{type(self.trainer.strategy).__name__}: use 'last'."
            )
        return parse_ckpt_path(self, state_fn, ckpt_path, *args, **kwargs)

    @wraps(resume_start)
    def start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.strategy, strategy):
            resume(self.trainer, checkpoint_path, lambda path: resume_start(self, path, *args, **kwargs))
        else:
            resume_start(self, checkpoint_path, *args, **kwargs)

    @wraps(restore_modules_and_callbacks)
    def restore(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.strategy, strategy):
            postpone(self.trainer, lambda: restore_modules_and_callbacks(self, *args, **kwargs))
        else:
            restore_modules_and_callbacks(self, *args, **kwargs)

    connector._parse_ckpt_path = parse  # type: ignore[method-assign]
    connector.resume_start = start  # type: ignore[method-assign]
    connector._restore_modules_and_callbacks = restore  # type: ignore[method-assign]


_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def check_output_of_training_step(output: Any) -> None:
    """Check that ``output`` is a valid output of ``training_step``, as Lightning does. Replaceable by a public check.

    Raises:
        MisconfigurationException: If the output is invalid.
    """
    ClosureResult.from_training_step_output(output)


def step_name(trainer: Trainer) -> str:
    """Return the name of the module's step that ``trainer`` is about to run."""
    assert trainer.state.fn is not None
    return _STEPS[trainer.state.fn]


def make_dataloader(trainer: Trainer) -> Any:
    """Return the loaders that the user's hook or argument gives for the run that begins.

    Their samplers are not replaced yet. Lightning gets the same loaders later, so that the hook is called only once,
    unless a checkpoint is loaded in between, which may change what the hook returns. Replaceable by a public property
    of the loops.
    """
    loops: dict[TrainerFn, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert trainer.state.fn is not None
    source = loops[trainer.state.fn]._data_source
    own = source.dataloader
    # Lightning records the arguments of samplers and loaders here, because it may make them again later.
    loaders = _request_dataloader(source)

    def made_before() -> Any:
        vars(source)["dataloader"] = own
        return loaders if trainer.ckpt_path is None else own()

    vars(source)["dataloader"] = made_before
    return loaders


def transferred(trainer: Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Return ``batch`` as Lightning passes it to a step: converted, on the device, and after the hooks for batches.

    Replaceable by a public function of the loops.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return trainer.strategy.batch_to_device(batch, trainer.strategy.root_device, dataloader_idx)


def are_sequential(loaders: Any) -> bool:
    """Return whether an evaluation runs over ``loaders`` one after another, which is the default.

    Replaceable by a public property of the ``CombinedLoader``.
    """
    return not isinstance(loaders, CombinedLoader) or loaders._mode == "sequential"


def update_metrics_apart(collection: MetricCollection) -> None:
    """Make ``collection`` update each of its metrics, without comparing states to find metrics that can share one.

    Replaceable by a way to switch off ``compute_groups`` of an existing collection.
    """
    names = list(collection._modules)
    vars(collection).update(_groups={index: [name] for index, name in enumerate(names)}, _groups_checked=True)


def run_examples_by(run: Callable[[LightningModule, Callable[[], None]], None]) -> None:
    """Make Lightning's ``ModelSummary`` call ``run`` to run a model on its example; calling this again is safe.

    Replaceable by a hook of the strategy.

    Args:
        run: Function that is called with the model and a function that runs it on its ``example_input_array``.
    """
    own = ModelSummary._forward_example_input
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def forward(self: ModelSummary) -> None:
        run(self._model, lambda: own(self))

    ModelSummary._forward_example_input = forward  # type: ignore[method-assign]


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a copy of the state that updates of ``metric`` change. Replaceable by a public method of torchmetrics."""
    states = {
        key: value.clone() if isinstance(value, torch.Tensor) else list(value)
        for key, value in metric.metric_state.items()
    }
    return states | {key: vars(metric)[key] for key in ("_update_count", "_computed", "_forward_cache")}


def set_metric_state(metric: Metric, state: Mapping[str, Any]) -> None:
    """Restore the state of ``metric`` that :func:`metric_state` returned."""
    vars(metric).update(state)


@contextmanager
def logging_to(
    module: LightningModule, on_log: Callable[..., None] = lambda *args, **kwargs: None
) -> Generator[None, None, None]:
    """Make ``self.log`` call only ``on_log`` in this context, because Lightning's own raises outside of its loops.

    Args:
        module: The module whose ``log`` and ``log_dict`` are replaced.
        on_log: Function with the arguments of ``self.log``; ``self.log_dict`` calls it for each of its values.
    """
    names = ("log", "log_dict")
    own = {name: vars(module)[name] for name in names if name in vars(module)}

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            on_log(name, value, *args, **kwargs)

    vars(module).update(log=on_log, log_dict=log_dict)
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        vars(module).update(own)


def let_groups_be_copied() -> None:
    """Make deep copies of modules and metrics share their process groups.

    Replaceable by a ``ProcessGroup.__deepcopy__`` in torch.
    """
    if not hasattr(dist.ProcessGroup, "__deepcopy__"):
        dist.ProcessGroup.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]


def gather_metrics_over(ranks: dist.ProcessGroup) -> Callable[[], None]:
    """Let metrics that have no process group of their own gather their states over ``ranks`` instead of all processes.

    Replaceable by a default process group in torchmetrics.

    Returns:
        A function that ends this.
    """
    name = "gather_all_tensors"
    own = getattr(metric_module, name)

    def gather(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        gathered: list[torch.Tensor] = own(result, ranks if group is None else group)
        return gathered

    setattr(metric_module, name, gather)
    return lambda: setattr(metric_module, name, own)


def optimizers_to_device(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Move the states of ``optimizers`` to ``device``, except those of parameters that other ranks have."""
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            if not (isinstance(param, torch.Tensor) and is_remote(param)):
                optimizer.state[param] = move_data_to_device(state, device)


def made_optimizers(module: LightningModule) -> list[torch.optim.Optimizer]:
    """Return new optimizers from ``module.configure_optimizers``."""
    return _init_optimizers_and_lr_schedulers(module)[0]


def seed_workers_by(loader: object, rank: int) -> None:
    """Seed the workers of ``loader`` by ``rank`` if Lightning would seed them by the global rank.

    Replaceable by a hook that gives Lightning this rank.
    """
    if isinstance(loader, DataLoader) and int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def silence_predictions(trainer: Trainer) -> list[Callback]:
    """Keep this rank from returning and writing predictions, and return the callbacks that were removed for that."""
    trainer.predict_loop.return_predictions = False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    writers: list[Callback] = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    callbacks[:] = [callback for callback in callbacks if callback not in writers]
    return writers


@contextmanager
def total_norms(
    total_norm: Callable[[Sequence[torch.Tensor], float], torch.Tensor | None],
) -> Generator[None, None, None]:
    """Make torch's ``clip_grad_norm_`` and ``get_total_norm`` use ``total_norm`` in this context.

    Lightning's gradient clipping calls them, and so may users' own. Replaceable by a hook of the strategy for the norm,
    such as Fabric's ``clip_gradients_norm``.

    Args:
        total_norm: Function that returns the norm of all ranks' gradients, given this rank's gradients and the order of
            the norm; it returns None if torch's own function computes the right value.
    """
    own = clip_grad._get_total_norm

    def of_all(
        tensors: Iterable[torch.Tensor] | torch.Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm = total_norm(gradients, float(norm_type))
        if norm is None:
            whole: torch.Tensor = own(gradients, norm_type, error_if_nonfinite, foreach)
            return whole
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {float(norm)}: they cannot be clipped. Set"
                " error_if_nonfinite=False to continue."
            )
        return norm

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = of_all
    try:
        yield
    finally:
        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = own
