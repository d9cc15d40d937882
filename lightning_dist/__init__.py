"""Train an ordinary LightningModule on many devices with a strategy that is chosen by its name.

Importing this package registers the strategies, so that ``Trainer(strategy="hybrid_shard")`` works.
"""

from lightning_dist.layout import ParallelLayout
from lightning_dist.parallel_module import full_parameters
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.global_batch import per_rank_batch_size
from lightning_dist.plugins.parity_check import check
from lightning_dist.plugins.precision import Float8Precision, MeshPrecision
from lightning_dist.plugins.strategies import (
    CheckpointOptions,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    MeshStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    register,
)
from lightning_dist.plugins.versions import warn_of_untested_versions
from lightning_dist.whole_files import install

__all__ = [
    "CheckpointOptions",
    "DataParallelStrategy",
    "FaultTolerance",
    "Float8Precision",
    "FullShardStrategy",
    "HybridShardStrategy",
    "MeshPrecision",
    "MeshStrategy",
    "NDParallelStrategy",
    "ParallelLayout",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
    "check",
    "full_parameters",
    "per_rank_batch_size",
]

warn_of_untested_versions()
register()
install()
