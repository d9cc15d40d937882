"""The private corners of Lightning that the plugins stand on, each with what would replace it. Tried with 2.6."""

from collections.abc import Callable
from datetime import timedelta

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as _utils_rank_zero_only
from torch.optim.swa_utils import AveragedModel


def logging_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs the current batch's metrics.

    ``trainer.global_step`` counts every optimizer's steps, so that two optimizers advance it twice a batch; curves
    drawn over it would not line up with those of ``self.log``. Replaced by: a public property of the Trainer, which
    LearningRateMonitor would use too.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def observe_fetching(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around every wait for a training batch, from the next epoch's start on.

    Replaced by: a hook around the fetching of a batch. The profiler's actions are one, but cost every other action too.
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
    """Reduce ``value`` over ``group`` as Lightning's own strategies do. Replaced by: a public ``reduce`` in Fabric."""
    return _sync_ddp_if_available(value, group, reduce_op=reduce_op)


def init_process_group(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> str:
    """Start torch.distributed as Lightning's own strategies do, and return the backend.

    Replaced by: a base class of Lightning for strategies that run one process a device.
    """
    reset_seed()
    backend = backend or _get_default_process_group_backend_for_device(device)
    device_id = device if device.type != "cpu" else None
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)
    return backend


def subprocess_launcher(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> _Launcher:
    """Return the launcher that starts this script once more for every local rank but the first."""
    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


def set_rank_zero(global_rank: int) -> None:
    """Tell both of Lightning's ``rank_zero_only`` which rank this is."""
    for decorator in (rank_zero_only, _utils_rank_zero_only):
        vars(decorator)["rank"] = global_rank


def average_model(callback: Callback) -> AveragedModel | None:
    """Return the average that a ``WeightAveraging`` callback keeps; replaced by a public property of the callback."""
    return callback._average_model if isinstance(callback, WeightAveraging) else None
