"""Turn the argument ``compression`` of a strategy into the engine's configuration, or refuse it."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.plugins import Precision

from lightning_dist.compression import CompressionConfig, Compressor, compressor_from
from lightning_dist.layout import ParallelLayout
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.plugins.precision import scales_losses

__all__ = ["CompressionArgument", "compression_config", "refuse_compression", "with_loss_scaling"]

CompressionArgument = str | Compressor | None
"""The name of a compressor, a compressor, or None or "none" for no compression."""


def compression_config(argument: CompressionArgument) -> CompressionConfig | None:
    """Return the configuration for the argument of a strategy.

    Raises:
        ValueError: If there is no compressor of this name.
    """
    return None if argument in (None, "none") else CompressionConfig(compressor_from(argument))


def with_loss_scaling(config: ParallelConfig, precision: Precision) -> ParallelConfig:
    """Return ``config`` with the information whether losses are scaled, for the compression."""
    if config.compression is None:
        return config
    return replace(config, compression=replace(config.compression, scales_losses=scales_losses(precision)))


def refuse_compression(config: ParallelConfig, layout: ParallelLayout, precision: Precision, strategy: str) -> None:
    """Refuse the compression of gradients where there is nothing to compress, or where residuals would be scaled.

    Args:
        config: The configuration from the strategy's arguments.
        layout: The sizes of the mesh's axes.
        precision: The run's precision plugin.
        strategy: Name of the strategy, for the error.

    Raises:
        ValueError: If the layout has one replica, or if losses are scaled and the compressor keeps residuals.
    """
    if config.compression is None:
        return
    compressor = config.compression.compressor
    if layout.dp_replicate == 1:
        raise ValueError(
            f"compression={str(compressor)!r} with strategy {strategy!r} on {layout}: it compresses gradients that"
            " replicas send each other, and there is one replica. Set dp_replicate_size to at least 2 (hybrid_shard,"
            " data_parallel or nd_parallel), or leave compression out."
        )
    if compressor.error_feedback and scales_losses(precision):
        raise ValueError(
            f"compression={str(compressor)!r} with error_feedback=True and precision={precision.precision!r}: residuals"
            " would be added to gradients of another loss scale. Use precision='bf16-mixed', or error_feedback=False."
        )
