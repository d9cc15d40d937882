"""Define the options of the compression of gradients, and of replicas that train on their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.compression.compression import Compression
from lightning_dist.techniques.compression.compressor import Compressor, compressor_from
from lightning_dist.techniques.compression.local_updates import LocalUpdates
from lightning_dist.techniques.compression.sync_methods import SyncMethod, sync_method_from
from lightning_dist.techniques.options import Arguments, Build, Fit, Run, TechniqueOptions
from lightning_dist.techniques.protocol import Parallel, Technique

__all__ = ["CompressionOptions", "SyncOptions"]

_OTHER_GRADIENTS = (
    "With {0}, gradients differ from those of one process by design: check the strategy without it ({0}=None), and the"
    " effect of {0} by the loss of a run."
)


@dataclass(frozen=True)
class SyncOptions(TechniqueOptions):
    """Choose how replicas are synchronized that train on their own.

    Args:
        sync: How replicas are synchronized that train on their own for a number of steps, instead of reducing their
            gradients in every step: :class:`~lightning_dist.compression.LocalSGD` or
            :class:`~lightning_dist.compression.DiLoCo`. None or ``"none"``: gradients are reduced.

    Raises:
        ValueError: If there is no method of this name.
    """

    sync: str | SyncMethod | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", None if self.sync in (None, "none") else sync_method_from(self.sync))

    is_for_training = True

    @property
    def method(self) -> SyncMethod | None:
        """Return the method; None: gradients are reduced in every step."""
        return self.sync if isinstance(self.sync, SyncMethod) else None

    @property
    def lets_replicas_differ(self) -> bool:  # type: ignore[override]
        """Return whether replicas train on their own."""
        return self.method is not None

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse synchronization of one replica, with experts, with a compressor, or with comparisons in between."""
        method, every = self.method, arguments["check_replicas_every_n_steps"]
        if method is None:
            return
        _refuse_experts("sync", run.layout)
        if run.layout.dp_replicate == 1:
            raise ValueError(
                f"sync={method} with strategy {run.strategy!r} on {run.layout}: it synchronizes replicas, and there is"
                " one. Set dp_replicate_size to at least 2 (hybrid_shard, data_parallel or nd_parallel), or leave sync"
                " out."
            )
        compressor = arguments.of(CompressionOptions).compressor
        if compressor is not None:
            raise ValueError(
                f"compression={str(compressor)!r} with sync={method}: replicas that train on their own do not send each"
                " other gradients. Leave one of the two out; DiLoCo(compression=...) compresses what is sent at a"
                " synchronization."
            )
        if every is not None and every % method.inner_steps:
            raise ValueError(
                f"check_replicas_every_n_steps={every} with sync={method}: replicas are equal only after a"
                f" synchronization. Use a multiple of {method.inner_steps}."
            )

    def check_fit(self, run: Run, fit: Fit, arguments: Arguments) -> None:
        """Refuse a method that needs automatic optimization for a module with manual optimization."""
        if self.method is not None and not fit.is_automatic and self.method.needs_automatic_optimization:
            raise ValueError(
                f"sync={self.method} with automatic_optimization = False in {fit.module}: inner steps are the steps of"
                " one optimizer that Lightning calls. Use LocalSGD, or automatic optimization."
            )

    def check_comparison(self) -> None:
        """Refuse a comparison with one process, whose gradients are others by design."""
        if self.method is not None:
            raise ValueError(_OTHER_GRADIENTS.format("sync"))

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the method as text."""
        return {"sync": None if self.method is None else str(self.method)}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique, unless the module is a copy, which gets no gradients."""
        if self.method is not None and build.copied is None:
            yield LocalUpdates(self.method, not build.is_automatic, build.layout.parameter_mesh(build.mesh))


@dataclass(frozen=True)
class CompressionOptions(TechniqueOptions):
    """Choose how gradients are compressed.

    Args:
        compression: How gradients are compressed that replicas send each other: the name of a compressor (``bf16``,
            ``fp16``, ``fp8``, ``int8``, ``powersgd``, ``topk``), or a :class:`~lightning_dist.compression.Compressor`.
            None or ``"none"``: they are not compressed.

    Raises:
        ValueError: If there is no compressor of this name.
    """

    compression: str | Compressor | None = None

    def __post_init__(self) -> None:
        compressor = None if self.compression in (None, "none") else compressor_from(self.compression)
        object.__setattr__(self, "compression", compressor)

    is_for_training = True

    @property
    def compressor(self) -> Compressor | None:
        """Return the compressor; None: gradients are not compressed."""
        return self.compression if isinstance(self.compression, Compressor) else None

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse compression of one replica, of distributed experts, and of scaled gradients with error feedback."""
        compressor = self.compressor
        if compressor is None:
            return
        _refuse_experts(f"compression={str(compressor)!r}", run.layout)
        if run.layout.dp_replicate == 1:
            raise ValueError(
                f"compression={str(compressor)!r} with strategy {run.strategy!r} on {run.layout}: it compresses"
                " gradients that replicas send each other, and there is one replica. Set dp_replicate_size to at least"
                " 2 (hybrid_shard, data_parallel or nd_parallel), or leave compression out."
            )
        if compressor.error_feedback and run.scales_losses:
            raise ValueError(
                f"compression={str(compressor)!r} with error_feedback=True and precision={run.precision!r}: residuals"
                " would be added to gradients of another loss scale. Use precision='bf16-mixed', or"
                " error_feedback=False."
            )

    def check_comparison(self) -> None:
        """Refuse a comparison with one process, whose gradients are others by design."""
        if self.compressor is not None:
            raise ValueError(_OTHER_GRADIENTS.format("compression"))

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return the compressor and its options as text."""
        if self.compressor is None:
            return {"compression": None}
        options = ", ".join(f"{key}={value}" for key, value in self.compressor.describe().items())
        return {"compression": f"{self.compressor} ({options})"}

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Build the technique, unless the module is a copy, which gets no gradients."""
        if self.compressor is not None and build.copied is None:
            yield Compression(self.compressor, build.scales_losses, build.sharding_mesh, build.parameter_mesh)


def _refuse_experts(asked: str, layout: ParallelLayout) -> None:
    if layout.ep > 1:
        raise ValueError(
            f"{asked} with ep_size={layout.ep}: a checkpoint cannot hold what replicas remember about experts that are"
            " distributed. Leave it out, or use ep_size=1."
        )
