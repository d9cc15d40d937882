"""Keep the global batch the same for every number of ranks, so that runs with different strategies are comparable."""

from lightning.pytorch import Trainer


def per_rank_batch_size(global_batch_size: int, trainer: Trainer | None) -> int:
    """Return the number of samples in each rank's batch.

    The global batch is split over the ranks that read different samples. The Trainer's sampler arguments count them:
    they are all ranks under data parallelism and sharding, and fewer under tensor or pipeline parallelism.

    Args:
        global_batch_size: Number of samples in one step over all ranks.
        trainer: Trainer that reads the data; None means a single process.

    Raises:
        ValueError: If ``global_batch_size`` is not a positive multiple of the number of data-parallel ranks.
    """
    sampler_kwargs = (trainer.distributed_sampler_kwargs if trainer else None) or {}
    num_replicas = sampler_kwargs.get("num_replicas", 1)
    if global_batch_size < 1 or global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        fitting = " or ".join(str(size) for size in (below, below + num_replicas) if size > 0)
        raise ValueError(
            f"global_batch_size={global_batch_size} cannot be split evenly over {num_replicas} data-parallel rank(s): "
            f"use {fitting}."
        )
    return global_batch_size // num_replicas
