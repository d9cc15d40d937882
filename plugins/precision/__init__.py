"""How Lightning's ``precision=`` becomes FSDP2's mixed-precision policy."""

from lightning_dist.plugins.precision.policy import PrecisionPolicy, precision_policy

__all__ = ["PrecisionPolicy", "precision_policy"]
