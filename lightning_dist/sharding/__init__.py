"""Full and hybrid sharding of parameters, gradients and optimizer states, by FSDP2.

- ``fully_sharded``: the technique.
- ``_compat``: the private names of FSDP2 that it stands on.
- ``unused_parameters``: parameters that have no gradient on some ranks, or on none.
- ``same_path``: a check that ranks which communicate run the same units.
"""

from lightning_dist.sharding.fully_sharded import Sharding, ShardingConfig

__all__ = ["Sharding", "ShardingConfig"]
