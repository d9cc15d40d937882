"""How Lightning's ``precision=`` becomes FSDP2's mixed-precision policy, and how float16's losses are scaled."""

from lightning_dist.plugins.precision.policy import PrecisionPolicy, precision_policy
from lightning_dist.plugins.precision.scaler import ShardedGradScaler, agree_on_overflows

__all__ = ["PrecisionPolicy", "ShardedGradScaler", "agree_on_overflows", "precision_policy"]
