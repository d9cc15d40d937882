"""Start processes and their groups as Lightning's own strategies do."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as _utils_rank_zero_only

from lightning_dist._compat import process_groups
from lightning_dist.mesh.rendezvous import fresh_store
from lightning_dist.parallel_module import full_parameters
from lightning_dist.run.doctor.devices import num_cores

__all__ = [
    "ForkLauncher",
    "ScriptLauncher",
    "init_process_group",
    "is_interactive",
    "let_children_exit",
    "let_groups_be_copied",
    "set_rank_zero",
    "set_timeout",
]


IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)

_num_started = itertools.count()
"""Number of process groups of all processes that :func:`init_process_group` has started in this process."""


def init_process_group(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> str:
    """Start torch.distributed as Lightning's own strategies do, and return the backend.

    The first group is bound to an accelerator, so that NCCL connects at once, and barriers need not guess the device.

    This could be replaced by a base class in Lightning for strategies that run one process per device.
    """
    reset_seed()
    backend = backend or default_backend(device)
    rank, world_size = environment.global_rank(), environment.world_size()
    # torch 2.13 cannot create groups of some ranks from a group of gloo that is bound to a device.
    backends = dict(part.rpartition(":")[::2] for part in backend.split(","))
    is_gloo = backends.get(device.type, backends.get("")) == "gloo"
    # It also crashes when it splits a group of all processes that is not the first one in this process, as a mesh does
    # with a group that is bound to a device. A later version of torch makes both conditions unnecessary.
    is_first = dist.is_initialized() or next(_num_started) == 0
    device_id = None if device.type == "cpu" or is_gloo or not is_first else device
    how: dict[str, Any] = {"timeout": timeout, "device_id": device_id}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        patience = timeout or default_pg_timeout
        shared = dist.TCPStore(
            environment.main_address, environment.main_port, world_size, is_master=False, timeout=patience
        )
        how["store"] = fresh_store(shared, rank, world_size, patience)
    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
        dist.init_process_group(backend, rank=rank, world_size=world_size, **how)
        if "nccl" in backends.values():
            atexit.register(_destroy_process_group)
    return backend


def _destroy_process_group() -> None:
    """Destroy all process groups, since NCCL warns of those that are left when a process ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def default_backend(device: torch.device) -> str:
    """Return the backend over which ranks communicate if none is named."""
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def set_timeout(timeout: timedelta | None) -> None:
    """Set the timeout of all process groups of this rank; None leaves them as they are.

    A device mesh creates its groups with torch's default timeout, whatever timeout the group of all processes has.
    This could be replaced by a ``timeout`` argument of ``init_device_mesh``.
    """
    if timeout is None:
        return
    for group in process_groups():
        with suppress(RuntimeError):  # torch raises one for backends that have no timeout.
            group.set_timeout(timeout)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Start this script again for every local rank but the first, as Lightning does, but without its observer.

    Lightning's observer ends the run five seconds after a process has failed, without naming the rank or the reason.
    This could be replaced by a public launcher with a method that observes the processes.
    """

    def start_processes(self) -> None:
        """Start the processes of the other local ranks, which :attr:`procs` then lists."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._call_children_scripts()

    def limit_threads(self) -> None:
        """Share the cores of the node among its processes, unless the user has set a number of threads."""
        if "OMP_NUM_THREADS" not in os.environ:
            num_threads = max(1, num_cores() // self.num_processes)
            torch.set_num_threads(num_threads)
            os.environ["OMP_NUM_THREADS"] = str(num_threads)


class ForkLauncher(_MultiProcessingLauncher):
    """Fork this process for every rank, as Lightning does in notebooks, and return with the weights of rank 0.

    This could be replaced by a launcher of Lightning that asks the strategy for the whole state dict.
    """

    def __init__(self, strategy: ParallelStrategy, refuse: Callable[[], None]) -> None:
        super().__init__(strategy, start_method="fork")
        self._refuse = refuse

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call ``function`` in a forked process for each rank, after ``refuse`` has raised no error."""
        self._refuse()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        with full_parameters(trainer.lightning_module):  # Lightning takes the state dict of the module.
            return super()._collect_rank_zero_results(trainer, results)


def is_interactive() -> bool:
    """Return whether this is a notebook or another interactive session, in which no script can be started again.

    What counts is the time of the import, as in Lightning: a debugger may have made a script interactive later.
    """
    return IS_INTERACTIVE


def set_rank_zero(global_rank: int) -> None:
    """Set the rank that each of Lightning's two ``rank_zero_only`` decorators compares with 0."""
    for decorator in (rank_zero_only, _utils_rank_zero_only):
        vars(decorator)["rank"] = global_rank


def let_children_exit(trainer: Trainer) -> None:
    """Keep Lightning's launcher from killing this process when the processes that it launched exit with an error code.

    This could be replaced by a launcher with an option for this.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        launcher.procs.clear()


def let_groups_be_copied() -> None:
    """Make deep copies of modules and metrics share their process groups.

    This could be replaced by a ``ProcessGroup.__deepcopy__`` in torch.
    """
    if not hasattr(dist.ProcessGroup, "__deepcopy__"):
        dist.ProcessGroup.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
