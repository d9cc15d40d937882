"""One global batch, whatever the number of ranks: what keeps runs with different strategies comparable."""

from lightning.pytorch import Trainer


def per_rank_batch_size(global_batch_size: int, trainer: Trainer | None) -> int:
    """Return each rank's share of a batch, in samples.

    The batch is split over the ranks that read different samples, as counted by the trainer's own sampler settings:
    all of them under data parallelism and sharding, fewer under tensor or pipeline parallelism.

    Args:
        global_batch_size: Samples in one step over all ranks.
        trainer: The trainer that reads the data; None stands for a single process.

    Raises:
        ValueError: ``global_batch_size`` is not a positive multiple of the number of data-parallel ranks.
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
