"""``strategy="tensor_parallel"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dist.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.tensor_parallel import TensorParallelConfig

__all__ = ["TensorParallelStrategy"]


class TensorParallelStrategy(MeshStrategy):
    """Splits single layers over the devices of a node, and shards what a device has over the rest (TP with FSDP2).

    The ranks of one ``tp`` have the same part of the batch.

    Args:
        tp_size: Number of processes that a layer is split over. None: the devices of a node, or what the other sizes
            leave.
        dp_shard_size: Number of processes that parameters and batch are sharded over. None: what is left.
        dp_replicate_size: Number of replicas. None: 1.
        plan: Module names to how they are split (``colwise``, ``rowwise``, ``colwise_gather_output``,
            ``embedding_rowwise``, ``replicate``, ``replicated_with_grad_allreduce``). In a name ``*`` stands for one
            part between dots; the beginning may be left out. None: ``tensor_parallel_plan()`` of the LightningModule,
            where it has one. A Hugging Face model's own plan is used for what is not named. What both leave out is
            inferred from a step; name a module with ``replicate`` to keep it whole.
        strict_plan: Raise where no plan can be inferred, or what was inferred does not compute the same as the whole
            model; else such modules are replicated.
        sequence_parallel: Whether hidden states between split layers are split along the sequence. None: where that
            computes the same.
        loss_parallel: Whether logits stay split along the vocabulary, for ``F.cross_entropy``. None: unless a step
            needs the whole of them.
        kwargs: As of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._tp_size = tp_size
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size
        self._tensor_parallel = TensorParallelConfig(plan, strict_plan, sequence_parallel, loss_parallel)

    def _requested_sizes(self) -> dict[str, int]:
        tp, shard = self._tp_size, self._dp_shard_size
        if tp is None:
            tp = self.num_processes if shard is None else REMAINING
        return {
            "dp_replicate": 1 if self._dp_replicate_size is None else self._dp_replicate_size,
            "dp_shard": REMAINING if shard is None else shard,
            "tp": tp,
        }
