"""Register the backend with NCCL's rules, and make it the default of Lightning and torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.nccl_rules.group import NAME
from tests.nccl_rules.memory import device
from tests.nccl_rules.messages import GroupWithMessages

__all__ = ["install"]


def install() -> None:
    """Register the backend in this process, as the default of its device. Do nothing if it is registered."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[device().type])
    dist.Backend.default_device_backend_map[device().type] = NAME
    batch = dist.batch_isend_irecv
    monitored = distributed_c10d.monitored_barrier

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, GroupWithMessages):
            return batch(operations)
        distributed_c10d._check_p2p_op_list(operations)
        group.start_batch()
        for op in operations:
            key = "group_dst" if op.op in (dist.isend, distributed_c10d.isend) else "group_src"
            op.op(op.tensor, group=op.group, tag=op.tag, **{key: op.group_peer})
        return [group.end_batch()]

    def monitored_barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(group or dist.group.WORLD, GroupWithMessages):
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")
        return monitored(group, *args, **kwargs)

    for module in (dist, distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv
        module.monitored_barrier = monitored_barrier


def _create(options: Any, backend_options: Any) -> GroupWithMessages:
    return device().group_class(GroupWithMessages)(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
    )
