"""Wrap every private name of FSDP2 that sharding uses.

- ``wrapped``: Lets a parameter be gathered as a tensor of another class.
- ``param``: Manages one parameter and its gathered copy.
- ``group``: Manages the parameters of a unit, which are gathered and reduced together.
- ``root``: Controls FSDP2's state for a whole step.

The names were checked with torch 2.13. "Replaced by" says which public feature of torch would make the code
unnecessary.
"""

from lightning_dist.techniques.sharding._compat.group import ShardedGroup, sharded_group
from lightning_dist.techniques.sharding._compat.root import (
    accumulating,
    flush_gradients,
    gather_before_views,
    initialize_root,
    reduce_gradients,
    reset_after_error,
)
from lightning_dist.techniques.sharding._compat.wrapped import WrapShard

__all__ = [
    "ShardedGroup", "WrapShard", "accumulating", "flush_gradients", "gather_before_views", "initialize_root",
    "reduce_gradients", "reset_after_error", "sharded_group",
]  # fmt: skip
