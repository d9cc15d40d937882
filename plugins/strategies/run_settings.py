"""Say how a strategy trains, for the parameters of a run."""

from __future__ import annotations

from typing import Any

from lightning_dist.parallel_module import ParallelModule
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.techniques.activation_checkpointing import CheckpointingMode
from lightning_dist.techniques.compression import Compressor
from lightning_dist.techniques.pipeline import Pipeline

__all__ = ["run_settings"]


def run_settings(config: ParallelConfig, parallel: ParallelModule) -> dict[str, Any]:
    """Return the settings that distinguish a run in a logger, besides its layout; None: the feature is not in use.

    Args:
        config: The configuration from the strategy's arguments.
        parallel: The parallel module, whose pipeline has its number of microbatches.
    """
    pipeline = parallel.get(Pipeline)
    checkpointing, offload = config.activation_checkpointing, config.offload
    return {
        "compression": None if config.compression is None else _compressor(config.compression.compressor),
        "sync": None if config.sync is None else str(config.sync.method),
        "schedule": None if pipeline is None else pipeline.config.schedule,
        "microbatches": None if pipeline is None else pipeline.config.num_microbatches,
        "stages_per_rank": None if pipeline is None else pipeline.config.stages_per_rank,
        "activation_checkpointing": _mode(checkpointing),
        "tiled_mlp": config.tiling.mlp,
        "tiled_loss": config.tiling.loss,
        "compile": None if config.compilation is None else str(config.compilation),
        "reshard_after_forward": config.sharding.reshard_after_forward,
        "offload": None if offload is None else offload.what,
    }


def _compressor(compressor: Compressor) -> str:
    return f"{compressor} ({', '.join(f'{key}={value}' for key, value in compressor.describe().items())})"


def _mode(checkpointing: CheckpointingMode) -> str | None:
    if not checkpointing:
        return None
    default = vars(CheckpointingMode(checkpointing.kind))
    options = [f"{key}={value}" for key, value in vars(checkpointing).items() if value != default[key]]
    return " ".join([checkpointing.kind, *options])
