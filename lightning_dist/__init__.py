"""Train an ordinary LightningModule on many devices with a strategy that is chosen by its name.

Importing this package registers the strategies, so that ``Trainer(strategy="hybrid_shard")`` works. It does so without
importing torch and Lightning, which takes seconds: the strategies are registered when Lightning is imported, or at once
if it is, and a public name is imported when it is first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from lightning_dist.run.after_import import call_after_import
from lightning_dist.run.torch_load import read_directories

if TYPE_CHECKING:
    __version__: str
    from lightning_dist.mesh.layout import ParallelLayout
    from lightning_dist.parallel_module import full_parameters
    from lightning_dist.plugins.callbacks import FaultTolerance
    from lightning_dist.plugins.global_batch import per_rank_batch_size
    from lightning_dist.plugins.loggers import MLflowLogger
    from lightning_dist.plugins.parity_check.check import check
    from lightning_dist.plugins.planning.auto_parallel import AutoParallelStrategy
    from lightning_dist.plugins.planning.report import PredictionReport
    from lightning_dist.plugins.precision import Float8Precision, MeshPrecision
    from lightning_dist.plugins.strategies import (
        CheckpointOptions,
        ContextParallelStrategy,
        DataParallelStrategy,
        FullShardStrategy,
        HybridShardStrategy,
        MeshStrategy,
        NDParallelStrategy,
        PipelineParallelStrategy,
        TensorParallelStrategy,
        register_technique,
    )

__all__ = [
    "AutoParallelStrategy",
    "CheckpointOptions",
    "ContextParallelStrategy",
    "DataParallelStrategy",
    "FaultTolerance",
    "Float8Precision",
    "FullShardStrategy",
    "HybridShardStrategy",
    "MLflowLogger",
    "MeshPrecision",
    "MeshStrategy",
    "NDParallelStrategy",
    "ParallelLayout",
    "PipelineParallelStrategy",
    "PredictionReport",
    "TensorParallelStrategy",
    "check",
    "full_parameters",
    "per_rank_batch_size",
    "register_technique",
]

if not TYPE_CHECKING:
    _MODULES = {
        "AutoParallelStrategy": "plugins.planning.auto_parallel",
        "FaultTolerance": "plugins.callbacks",
        "Float8Precision": "plugins.precision",
        "MLflowLogger": "plugins.loggers",
        "MeshPrecision": "plugins.precision",
        "ParallelLayout": "mesh.layout",
        "PredictionReport": "plugins.planning.report",
        "check": "plugins.parity_check",
        "full_parameters": "parallel_module",
        "per_rank_batch_size": "plugins.global_batch",
    }
    """Modules that define the public names; those that are not listed are in ``plugins.strategies``."""

    # A type checker must not see this function, for which any name would be an attribute.
    def __getattr__(name: str) -> object:
        if name == "__version__":
            return version(__name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_MODULES.get(name, 'plugins.strategies')}")
        globals()[name] = value = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _extend_lightning() -> None:
    from lightning_dist.checkpoint.whole_files import install
    from lightning_dist.plugins.planning.auto_parallel import AutoParallelStrategy
    from lightning_dist.plugins.strategies import register, register_strategy
    from lightning_dist.plugins.versions import warn_of_other_versions

    warn_of_other_versions()
    register()
    register_strategy(AutoParallelStrategy)
    install()


call_after_import("torch", read_directories)
call_after_import("lightning.pytorch", _extend_lightning)
