"""Provide ``strategy="tensor_parallel"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.techniques.tensor_parallel import TensorParallelConfig

__all__ = ["TensorParallelStrategy"]


class TensorParallelStrategy(MeshStrategy):
    """Split single layers over the devices of a node, and shard each device's part over the rest (TP with FSDP2).

    The ranks of one ``tp`` group have the same part of the batch.

    Args:
        tp_size: Number of processes that a layer is split over. None: the number of devices of a node, or, if
            ``dp_shard_size`` is given, the number of processes divided by the other sizes.
        dp_shard_size: Number of processes that parameters and batch are sharded over. None: the number of processes
            divided by the other sizes.
        dp_replicate_size: Number of replicas. None: 1.
        plan: Style of each module, by name: ``colwise``, ``packed_colwise:3`` (with the number of packed layers),
            ``rowwise``, ``colwise_gather_output``, ``embedding_rowwise``, ``experts``, ``replicate`` or
            ``replicated_with_grad_allreduce``. In a name, ``*`` stands for one part between dots and ``**`` for one or
            more, and the first parts may be left out. None:
            ``tensor_parallel_plan()`` of the LightningModule, if it defines this method. A Hugging Face model's own
            plan is used for modules that are not named. For modules that neither names, the plan is inferred from a
            step; name a module with ``replicate`` to keep it whole.
        strict_plan: Whether to raise an error where no plan can be inferred, or where an inferred plan does not compute
            the same as the whole model. If False, such modules are replicated.
        sequence_parallel: Whether hidden states between split layers are split along the sequence. None: they are split
            where this does not change the results.
        loss_parallel: Whether logits stay split along the vocabulary, for ``F.cross_entropy``. None: they stay split
            unless a step needs whole logits.
        async_tensor_parallel: Whether layers exchange tokens while they multiply, with the kernels of
            ``torch.ops.symm_mem``. It needs CUDA devices of one node, and hidden states that are split along the
            sequence.
        ep_size: Number of processes over which experts are distributed (expert parallelism), a divisor of
            ``dp_shard_size``. Experts are distributed over ``tp`` as well, if ``ep_size * tp_size`` divides their
            number. None: 1.
        expert_capacity: Largest number of tokens that a process sends to one expert in a forward of a training step.
            The others are left out for this expert, so that all sizes are known beforehand, and no host waits for
            numbers of tokens. None: all tokens are sent.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "tensor_parallel"

    def __init__(
        self,
        tp_size: int | None = None,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        plan: Mapping[str, str] | None = None,
        strict_plan: bool = False,
        sequence_parallel: bool | None = None,
        loss_parallel: bool | None = None,
        async_tensor_parallel: bool = False,
        ep_size: int | None = None,
        expert_capacity: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._tp_size = tp_size
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size
        self._ep_size = ep_size
        splitting = TensorParallelConfig(plan, strict_plan, sequence_parallel, loss_parallel, async_tensor_parallel)
        self._config = replace(self._config, tensor_parallel=splitting, expert_capacity=expert_capacity)

    def _requested_sizes(self) -> dict[str, int]:
        tp, shard = self._tp_size, self._dp_shard_size
        if tp is None:
            tp = self.num_processes if shard is None else REMAINING
        return {
            "dp_replicate": 1 if self._dp_replicate_size is None else self._dp_replicate_size,
            "dp_shard": REMAINING if shard is None else shard,
            "tp": tp,
            "ep": 1 if self._ep_size is None else self._ep_size,
        }
