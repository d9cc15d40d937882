"""Provide ``strategy="nd_parallel"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_dist.techniques.context_parallel import ContextParallelConfig
from lightning_dist.techniques.tensor_parallel import TensorParallelConfig

__all__ = ["NDParallelStrategy"]


class NDParallelStrategy(PipelineParallelStrategy):
    """Combine pipeline stages, replicas, sharding, and the splitting of sequences and layers, in one mesh.

    The arguments for stages are explained in
    :class:`~lightning_dist.plugins.strategies.pipeline_parallel.PipelineParallelStrategy`, those for tensor parallelism
    in :class:`~lightning_dist.plugins.strategies.tensor_parallel.TensorParallelStrategy`.

    Args:
        pp_size: Number of processes that the stages are distributed over. None: 1.
        dp_replicate_size: Number of replicas. None: 1.
        dp_shard_size: Number of processes that a stage and the batch are sharded over. None: the number of processes
            divided by the other sizes.
        tp_size: Number of processes that a layer is split over. None: 1.
        cp_size: Number of processes that a sequence is split over (context parallelism). None: 1.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of the product of
            ``dp_shard_size`` and ``cp_size`` (expert parallelism). None: 1.
        expert_capacity: Largest number of tokens that a process sends to one expert in a forward of a training step.
            The others are left out for this expert, so that all sizes are known beforehand, and no host waits for
            numbers of tokens. None: all tokens are sent.
        num_microbatches: Number of microbatches that a rank's part of the batch is split into. None: it is derived from
            the batch size.
        schedule: Name of the pipeline's schedule.
        virtual_stages: Number of stages on a process. None: 1, or 2 for a schedule that needs several.
        split: Names of the modules that each stage but the first begins with. None: stages are balanced by cost.
        plan: Mapping of module names to the way in which they are split over ``tp``.
        strict_plan: Whether to raise an error where no plan can be inferred, or an inferred plan changes results.
        sequence_parallel: Whether hidden states between split layers are split along the sequence; not supported
            together with stages.
        loss_parallel: Whether logits stay split along the vocabulary.
        async_tensor_parallel: Whether layers exchange tokens while they multiply; not supported together with stages.
        attention: How attention sees the tokens of other ranks of ``cp``: ``"ulysses"``, ``"all_gather"`` or
            ``"auto"`` (see :class:`~lightning_dist.plugins.strategies.context_parallel.ContextParallelStrategy`).
        split_evaluations: Whether blocks run on parts of the sequence in validation, test and predict steps as well.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.

    Raises:
        ValueError: If ``sequence_parallel`` is set together with stages.
    """

    strategy_name = "nd_parallel"

    def __init__(
        self,
        pp_size: int | None = None,
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        tp_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        split: Sequence[str] | None = None,
        plan: Mapping[str, str] | None = None,
        strict_plan: bool = False,
        sequence_parallel: bool | None = None,
        loss_parallel: bool | None = None,
        async_tensor_parallel: bool = False,
        attention: str = "auto",
        split_evaluations: bool = False,
        expert_capacity: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            pp_size, num_microbatches, schedule, virtual_stages, split, dp_shard_size, dp_replicate_size, **kwargs
        )
        self._tp_size = tp_size
        self._cp_size = cp_size
        self._ep_size = ep_size
        splitting = TensorParallelConfig(plan, strict_plan, sequence_parallel, loss_parallel, async_tensor_parallel)
        self._config = replace(
            self._config,
            tensor_parallel=splitting,
            context_parallel=ContextParallelConfig(attention, split_evaluations),
            expert_capacity=expert_capacity,
        )

    def _requested_sizes(self) -> dict[str, int]:
        asked = {
            "pp": self._pp_size,
            "dp_replicate": self._dp_replicate_size,
            "dp_shard": self._dp_shard_size,
            "cp": self._cp_size,
            "tp": self._tp_size,
            "ep": self._ep_size,
        }
        sizes = {axis: 1 if size is None else size for axis, size in asked.items()}
        if self._dp_shard_size is None and REMAINING not in sizes.values():
            sizes["dp_shard"] = REMAINING
        return sizes

    def configure_launcher(self) -> None:
        """Refuse sequence parallelism between stages as well."""
        super().configure_launcher()
        splitting = self._config.tensor_parallel
        if self.layout.pp > 1 and self.layout.tp > 1:
            if splitting.sequence_parallel:
                raise ValueError(
                    f"sequence_parallel=True with pp_size={self.layout.pp}: stages send each other whole hidden states."
                    " Leave sequence_parallel out, or use pp_size=1."
                )
            splitting = replace(splitting, sequence_parallel=False)
            self._config = replace(self._config, tensor_parallel=splitting)
