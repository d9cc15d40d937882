"""Turn Lightning's ``precision=`` into FSDP2's mixed-precision policy, and scale losses for float16."""

from lightning_dist.plugins.precision.master_weights import MasterWeights
from lightning_dist.plugins.precision.mesh_precision import MeshPrecision
from lightning_dist.plugins.precision.policy import PrecisionPolicy, precision_policy
from lightning_dist.plugins.precision.scaler import ShardedGradScaler, agree_on_overflows, scales_losses

__all__ = [
    "MasterWeights",
    "MeshPrecision",
    "PrecisionPolicy",
    "ShardedGradScaler",
    "agree_on_overflows",
    "precision_policy",
    "scales_losses",
]
