"""Shard parameters, gradients and optimizer states by FSDP2, over all ranks (full) or inside replicas (hybrid).

- ``options``: Defines the arguments.
- ``fully_sharded``: Defines the technique.
- ``_compat``: Wraps the private names of FSDP2 that the technique uses.
- ``unused_parameters``: Handles parameters that have a gradient on only some ranks, or on none.
- ``same_path``: Checks that ranks which communicate run the same units.
"""

from lightning_dist.techniques.sharding._compat import WrapShard
from lightning_dist.techniques.sharding.fully_sharded import Sharding, ShardingConfig
from lightning_dist.techniques.sharding.options import ShardingOptions

__all__ = ["Sharding", "ShardingConfig", "ShardingOptions", "WrapShard"]
