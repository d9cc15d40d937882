"""Wrap every private name of FSDP2 that sharding uses. Checked with torch 2.13.

- ``param``: one parameter of a group, with the state that its gathered copy has.
- ``group``: the parameters of a unit, which are gathered and reduced together.
- ``root``: FSDP2's state for a whole step.

"Replaced by" says which public feature of torch would make the code unnecessary.
"""

from lightning_dist.sharding._compat.group import ShardedGroup, sharded_group
from lightning_dist.sharding._compat.root import (
    accumulating,
    flush_gradients,
    gather_before_views,
    initialize_root,
    reduce_gradients,
    reset_after_error,
)

__all__ = [
    "ShardedGroup", "accumulating", "flush_gradients", "gather_before_views", "initialize_root",
    "reduce_gradients", "reset_after_error", "sharded_group",
]  # fmt: skip
