"""The order in which a module is made parallel, one call a technique."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.initialization import agreed_seed, broadcast_weights
from lightning_dist.layout import ParallelLayout
from lightning_dist.sharding import ShardedModule, ShardingConfig, shard
from lightning_dist.tensor_parallel import TensorParallel, resolve_plan
from lightning_dist.units import MIN_NUM_PARAMS, find_units

__all__ = ["parallelize"]


def parallelize(
    module: nn.Module,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    sharding: ShardingConfig,
    unit_classes: Sequence[str] | None = None,
    min_num_params: int = MIN_NUM_PARAMS,
    plan: Mapping[str, str] | None = None,
) -> ShardedModule:
    """Spread ``module`` over ``mesh`` as ``layout`` says, in place. A collective over all processes.

    Args:
        module: An ordinary module, on the mesh's device or (parts of it) on the meta device.
        layout: The sizes of the mesh's axes.
        mesh: From :meth:`ParallelLayout.build_mesh`.
        sharding: How parameters are sharded.
        unit_classes: Names of the block classes; None finds them.
        min_num_params: Size from which a module outside the blocks is sharded as one.
        plan: How layers are split over ``tp``; see :func:`~lightning_dist.tensor_parallel.resolve_plan`.

    Raises:
        ValueError: If the module has no parameters, is already sharded, has no module of a named class, or does not
            fit the plan.
        TypeError: If something on the meta device has no way to be initialised.
    """
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"The parameter {name!r} is already a DTensor: remove the fully_shard or parallelize_module calls from"
                " the LightningModule, or leave the strategy to them (Lightning's ModelParallelStrategy)."
            )
    units = find_units(module, unit_classes, min_num_params)
    for param in module.parameters():
        if not param.is_contiguous():  # such as channels_last, which FSDP2 does not take
            param.data = param.data.contiguous()
    tensor_parallel = None
    if layout.tp > 1 or plan is not None:
        resolved = resolve_plan(module, plan)  # a name that matches nothing is wrong on one device, too
        tensor_parallel = TensorParallel(module, resolved, mesh["tp"]) if layout.tp > 1 else None
    broadcast_weights(module)
    seed = agreed_seed()
    on_cpu = mesh.device_type == "cpu"
    devices = [] if on_cpu else [torch.get_device_module(mesh.device_type).current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if on_cpu else mesh.device_type), torch.no_grad():
        torch.manual_seed(seed)
        sharding_mesh, parameter_mesh = layout.sharding_mesh(mesh), layout.parameter_mesh(mesh)
        return shard(module, units, sharding_mesh, sharding, tensor_parallel, parameter_mesh)
