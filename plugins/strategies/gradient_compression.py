"""Turn the arguments ``compression`` and ``sync`` of a strategy into the engine's configuration, or refuse them."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.parallelize import ParallelConfig
from lightning_dist.plugins.precision import scales_losses
from lightning_dist.techniques.compression import (
    CompressionConfig,
    Compressor,
    SyncConfig,
    SyncMethod,
    compressor_from,
    sync_method_from,
)

__all__ = [
    "CompressionArgument",
    "SyncArgument",
    "compression_config",
    "refuse_compression",
    "refuse_manual_optimization",
    "sync_config",
    "with_loss_scaling",
]

CompressionArgument = str | Compressor | None
"""The name of a compressor, a compressor, or None or "none" for no compression."""


SyncArgument = str | SyncMethod | None
"""How replicas are synchronized that train on their own; None or "none": they reduce their gradients in every step."""


def compression_config(argument: CompressionArgument) -> CompressionConfig | None:
    """Return the configuration for the argument of a strategy.

    Raises:
        ValueError: If there is no compressor of this name.
    """
    return None if argument in (None, "none") else CompressionConfig(compressor_from(argument))


def sync_config(method: SyncArgument) -> SyncConfig | None:
    """Return the configuration for the argument ``sync`` of a strategy.

    Raises:
        ValueError: If there is no method of this name.
    """
    return None if method in (None, "none") else SyncConfig(sync_method_from(method))


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
        ValueError: If the layout has one replica, or if losses are scaled and the compressor keeps residuals, or if
            ``sync`` is given as well, or does not fit the comparison of replicas, or if experts are distributed.
    """
    if layout.ep > 1 and (config.compression is not None or config.sync is not None):
        asked = "sync" if config.compression is None else f"compression={str(config.compression.compressor)!r}"
        raise ValueError(
            f"{asked} with ep_size={layout.ep}: a checkpoint cannot hold what replicas remember about experts that are"
            " distributed. Leave it out, or use ep_size=1."
        )
    _refuse_sync(config, layout, strategy)
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


def _refuse_sync(config: ParallelConfig, layout: ParallelLayout, strategy: str) -> None:
    if config.sync is None:
        return
    method, every = config.sync.method, config.check_replicas_every_n_steps
    if layout.dp_replicate == 1:
        raise ValueError(
            f"sync={method} with strategy {strategy!r} on {layout}: it synchronizes replicas, and there is one. Set"
            " dp_replicate_size to at least 2 (hybrid_shard, data_parallel or nd_parallel), or leave sync out."
        )
    if config.compression is not None:
        raise ValueError(
            f"compression={str(config.compression.compressor)!r} with sync={method}: replicas that train on their own"
            " do not send each other gradients. Leave one of the two out; DiLoCo(compression=...) compresses what is"
            " sent at a synchronization."
        )
    if every is not None and every % method.inner_steps:
        raise ValueError(
            f"check_replicas_every_n_steps={every} with sync={method}: replicas are equal only after a synchronization."
            f" Use a multiple of {method.inner_steps}."
        )


def refuse_manual_optimization(config: ParallelConfig, module: LightningModule) -> None:
    """Refuse a method that needs automatic optimization for a module with manual optimization.

    Raises:
        MisconfigurationException: If the two do not fit.
    """
    if config.sync is None or module.automatic_optimization or not config.sync.method.needs_automatic_optimization:
        return
    raise MisconfigurationException(
        f"sync={config.sync.method} with automatic_optimization = False in {type(module).__name__}: inner steps are the"
        " steps of one optimizer that Lightning calls. Use LocalSGD, or automatic optimization."
    )
