"""Describe a strategy to the objects that it consists of, which do not import it."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch.optim import Optimizer

from lightning_dist.mesh.groups import MeshGroups
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.techniques.options import PrecisionPolicy

__all__ = ["Host"]


class Host(Protocol):
    """Describe what the parts of a strategy may use of it."""

    strategy_name: ClassVar[str]
    """The name by which users choose the strategy."""

    @property
    def config(self) -> ParallelConfig:
        """Return the options of all techniques."""

    @property
    def layout(self) -> ParallelLayout:
        """Return the sizes of the mesh's axes, once the Trainer has been created."""

    @property
    def groups(self) -> MeshGroups:
        """Return the mesh and the groups of ranks, once the processes have been launched."""

    @property
    def module(self) -> LightningModule:
        """Return the user's module, once the Trainer runs it."""

    @property
    def trainer(self) -> Trainer:
        """Return the Trainer that runs the module."""

    @property
    def is_set_up(self) -> bool:
        """Return whether the module has been made parallel."""

    @property
    def parallel(self) -> ParallelModule:
        """Return the parallel module, once the strategy is set up."""

    @property
    def precision_plugin(self) -> Precision:
        """Return Lightning's precision plugin."""

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """Return the dtypes in which parameters are gathered and gradients are reduced."""

    @property
    def process_group_backend(self) -> str | None:
        """Return the backend of the process group."""

    @property
    def layer_sync(self) -> LayerSync | None:
        """Return what ``Trainer(sync_batchnorm=True)`` asks for; None: nothing."""

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of a fit."""

    @property
    def optimizer_rows(self) -> list[tuple[str, str]]:
        """Return the rows about optimizers for the table at the start of a run."""

    @property
    def num_processes(self) -> int:
        """Return the number of processes on this node."""

    @property
    def global_rank(self) -> int:
        """Return this process's rank."""

    @property
    def world_size(self) -> int:
        """Return the number of all processes."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the ``obj`` of rank ``src`` on all ranks. This is a collective over all processes."""
