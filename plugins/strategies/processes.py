"""Launch the processes of a run, give each its rank, and let them communicate."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_dist._compat import backend_of
from lightning_dist.mesh.collectives import gather
from lightning_dist.mesh.objects import broadcast_object
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.gpus import refuse_shared_gpu
from lightning_dist.plugins.strategies.launcher import RankLauncher, starts_ranks
from lightning_dist.plugins.strategies.metric_reduction import reduce_metric

__all__ = ["ProcessStrategy"]


class ProcessStrategy(_compat.LightningStrategy):
    """Run one process for each device.

    Args:
        process_group_backend: The backend of the process group, such as ``"nccl"`` or ``"gloo"``; None: the default
            for the device.
        timeout: The time after which a collective fails; None: torch's default.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__()
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self.num_nodes = 1

    @property
    def is_distributed(self) -> bool:
        """Return True, so that Lightning gives the data loaders a distributed sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank."""
        if self.parallel_devices is None:
            raise RuntimeError("The Trainer gives a strategy its devices when it is created.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Return the number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def timeout(self) -> timedelta | None:
        """Return the time for which ranks wait for each other in a collective; None: torch's default."""
        return self._timeout

    @property
    def process_group_backend(self) -> str | None:
        """Return the backend in use; before the process group exists, the one that the user has set, or None."""
        return self._process_group_backend

    @override
    def configure_launcher(self) -> None:
        """Start this script once more for each other rank of the node, unless something else starts the processes.

        In a notebook, which is no script, the other ranks are forked from this process.

        Raises:
            MisconfigurationException: If this is a notebook whose process cannot be forked.
        """
        environment = self._environment
        if isinstance(environment, TorchElasticEnvironment):
            self._follow_torchrun()
        if _compat.is_interactive() and not environment.creates_processes_externally:
            if self.num_nodes * self.num_processes > 1:
                self._refuse_fork()
                self.set_launcher(_compat.ForkLauncher(self, self._refuse_fork))
        elif starts_ranks(environment):
            self.set_launcher(RankLauncher(environment, self.num_processes, self.num_nodes, self.what_was_saved))

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError("The Trainer gives a strategy its cluster environment when it is created.")
        return self.cluster_environment

    def _refuse_fork(self) -> None:
        """Check that the ranks can be forked from this process.

        Raises:
            MisconfigurationException: If they cannot.
        """
        if self.num_nodes > 1:
            why = f"num_nodes={self.num_nodes} cannot be started from a notebook"
        elif self.root_device.type == "cuda" and torch.cuda.is_initialized():
            why = "the kernel of this notebook cannot be forked, as it uses CUDA already (restarting it helps)"
        elif dist.is_initialized():
            why = "the kernel of this notebook has run a Trainer with one device, and cannot be forked now (restart it)"
        else:
            return
        raise MisconfigurationException(
            f"Trainer(devices={self.num_processes}): {why}. Put the code into a script, and run it by `python train.py`"
            f" or `torchrun --nproc-per-node={self.num_processes} train.py`; or use devices=1 here."
        )

    def _follow_torchrun(self) -> None:
        """Set the number of nodes to torchrun's, which may be any number in the range that torchrun was given.

        Raises:
            MisconfigurationException: If torchrun started another number of processes on this node than ``devices``.
        """
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_processes))
        if per_node != self.num_processes:
            raise MisconfigurationException(
                f"Trainer(devices={self.num_processes}), but torchrun started {per_node} processes on this node. Give"
                f" the same number to both: devices={per_node}, or torchrun --nproc-per-node={self.num_processes}."
            )
        num_nodes = int(os.environ["WORLD_SIZE"]) // per_node
        if num_nodes != self.num_nodes:
            rank_zero_info(f"num_nodes={self.num_nodes} was changed to {num_nodes}, the number of torchrun's nodes.")
            self.num_nodes = num_nodes

    def what_was_saved(self) -> str:
        """Return a sentence on what the run has saved, for messages about its end; empty if there is none."""
        return ""

    def set_world_ranks(self) -> None:
        """Set this process's rank in the cluster environment and in Lightning's functions that run on rank 0 only."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _compat.set_rank_zero(self.global_rank)

    def setup_environment(self) -> None:
        """Set up the accelerator, and initialize the default process group.

        Raises:
            MisconfigurationException: If another process uses the same GPU, which NCCL does not support.
        """
        super().setup_environment()
        self.set_world_ranks()
        try:
            self._process_group_backend = _compat.init_process_group(
                self._environment, self.root_device, self._process_group_backend, self._timeout
            )
        except dist.DistBackendError as error:
            refuse_shared_gpu(error, self.num_processes, self.num_nodes)
            raise

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; do nothing without a process group. This is a collective over all processes.

        Args:
            name: Ignored; Lightning passes it.
        """
        if dist.is_initialized():
            # With offload="params", the backend is "cpu:gloo,cuda:nccl".
            on_device = self.root_device.type == "cuda" and "nccl" in backend_of()
            dist.barrier(device_ids=[self.root_device.index] if on_device else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the ``obj`` of rank ``src`` on all ranks. This is a collective over all processes.

        Args:
            obj: This rank's object, which can be pickled; only that of rank ``src`` is sent.
            src: The global rank that sends its object.
        """
        if not dist.is_initialized():
            return obj
        return broadcast_object(obj, source=src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks along a new first dimension. This is a collective over ``group``.

        Args:
            tensor: This rank's tensor, of the same shape on all ranks. A DTensor is made whole first.
            group: Process group of the ranks; None: all processes.
            sync_grads: Whether gradients are propagated through the collective.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not dist.is_initialized():
            return tensor
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return gather(tensor, group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision. This is a collective over all processes, including those that share a part of the batch.

        Args:
            decision: The decision of this rank.
            all: Whether the result is True only if the decision is True on all ranks; otherwise, one rank suffices.
        """
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a tensor over the ranks that have a part of the batch, here all ranks.

        Args:
            tensor: This rank's tensor, such as a logged metric. Any other value is returned unchanged.
            group: Process group of the ranks; None: all processes.
            reduce_op: The reduction: ``"mean"`` or another name of a ``ReduceOp``, or a ``ReduceOp``; None: the sum.

        Raises:
            ValueError: If there is no reduction of this name.
        """
        if isinstance(tensor, DTensor):  # A hook may reduce what it has computed from shards.
            tensor = tensor.full_tensor()
        return reduce_metric(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor
