"""Wrap every private name of torch that this package uses.

- ``autograd``: Runs functions when a backward begins or ends.
- ``hooks``: Reads, moves and calls hooks.
- ``modules``: Changes what modules hold and what a call of them runs.
- ``processes``: Reaches process groups and the record of their collectives.
- ``tensors``: Reads and changes DTensors.

The names were checked with torch 2.13. Those of FSDP2 are in ``lightning_dist.sharding._compat``. "Replaced by" says
which public feature of torch would make a function here unnecessary.
"""

from lightning_dist._compat.autograd import (
    around_backwards,
    around_grads,
    around_zero_grad,
    at_end_of_backward,
    compile_backwards_without_autocast,
    is_in_backward,
    overwrite,
    without_torch_functions,
)
from lightning_dist._compat.hooks import (
    call_forward_hooks,
    call_gradient_hooks,
    call_post_accumulate_hooks,
    give_post_accumulate_hooks,
    leave_out_hooks,
    move_hooks,
    prepend_step_post_hook,
    share_hooks,
    step_hooks,
    take_post_accumulate_hooks,
)
from lightning_dist._compat.modules import (
    NORM,
    ROUTE,
    averages_grouped_by_dtype,
    call,
    move_without_meta_tensors,
    put_parameter,
    route_calls,
    without_weak_references,
)
from lightning_dist._compat.processes import (
    default_group,
    default_store,
    num_collectives,
    process_groups,
    recorded_collectives,
)
from lightning_dist._compat.tensors import (
    GROUPED_MM,
    accept_sequential_redistribution,
    local_of,
    num_packed,
    on_equal,
    on_scalar_read,
    packed_shard,
    replace_local,
    shifted,
)

__all__ = [
    "GROUPED_MM",
    "NORM",
    "ROUTE",
    "accept_sequential_redistribution",
    "around_backwards",
    "around_grads",
    "around_zero_grad",
    "at_end_of_backward",
    "averages_grouped_by_dtype",
    "call",
    "call_forward_hooks",
    "call_gradient_hooks",
    "call_post_accumulate_hooks",
    "compile_backwards_without_autocast",
    "default_group",
    "default_store",
    "give_post_accumulate_hooks",
    "is_in_backward",
    "leave_out_hooks",
    "local_of",
    "move_hooks",
    "move_without_meta_tensors",
    "num_collectives",
    "num_packed",
    "on_equal",
    "on_scalar_read",
    "overwrite",
    "packed_shard",
    "prepend_step_post_hook",
    "process_groups",
    "put_parameter",
    "recorded_collectives",
    "replace_local",
    "route_calls",
    "share_hooks",
    "shifted",
    "step_hooks",
    "take_post_accumulate_hooks",
    "without_torch_functions",
    "without_weak_references",
]  # fmt: skip
