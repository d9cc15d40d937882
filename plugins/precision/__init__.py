"""Turn Lightning's ``precision=`` into FSDP2's policy, scale losses for float16, and compute in bfloat16 or float8."""

from lightning_dist.plugins._compat import ShardedGradScaler
from lightning_dist.plugins.precision.float8 import Float8Precision, use_precision_again
from lightning_dist.plugins.precision.master_weights import KEPT_BYTES, MasterWeights
from lightning_dist.plugins.precision.mesh_precision import MeshPrecision
from lightning_dist.plugins.precision.policy import (
    PrecisionPolicy,
    check_reduce_dtype,
    precision_policy,
    refuse_uncomputable,
)
from lightning_dist.plugins.precision.scaler import agree_on_overflows, scales_losses

__all__ = [
    "KEPT_BYTES",
    "Float8Precision",
    "MasterWeights",
    "MeshPrecision",
    "PrecisionPolicy",
    "ShardedGradScaler",
    "agree_on_overflows",
    "check_reduce_dtype",
    "precision_policy",
    "refuse_uncomputable",
    "scales_losses",
    "use_precision_again",
]
