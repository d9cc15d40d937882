"""The order in which a module is made parallel, one call a technique."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.consensus import check_agreement, raise_on_all_ranks
from lightning_dist.initialization import agreed_seed, broadcast_weights
from lightning_dist.layout import ParallelLayout
from lightning_dist.pipeline import OriginalModule, Pipeline, PipelineConfig, drop_remote, find_stages, own_units
from lightning_dist.sharding import ShardedModule, ShardingConfig, shard
from lightning_dist.tensor_parallel import Entry, Plan, Provenance, StepTrace, TensorParallel, make_plan, resolve_plan
from lightning_dist.tracing import run_on_fakes
from lightning_dist.units import MIN_NUM_PARAMS, Unit, find_units

__all__ = ["TensorParallelConfig", "parallelize"]


@dataclass(frozen=True)
class TensorParallelConfig:
    """How layers are split over ``tp``.

    Args:
        plan: See :func:`~lightning_dist.tensor_parallel.resolve_plan`.
        is_strict: Raise where no plan can be inferred, or one that was inferred does not compute the same.
        sequence_parallel: Whether hidden states are split along the sequence; None: where that computes the same.
        loss_parallel: Whether logits stay split along the vocabulary; None: unless a step needs the whole of them.
        step: A step of the module on a batch, which is made of what this is given makes of each tensor; None: none is
            known, and ``why_no_step`` says why.
        why_no_step: See ``step``.
        planned: What is done, as it was found for a module of which this one is a copy; None: it is to be found.
    """

    plan: Mapping[str, str] | None = None
    is_strict: bool = False
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    step: Callable[[Callable[[Tensor], Tensor]], Any] | None = None
    why_no_step: str = "no step is known"
    planned: Plan | None = None


def parallelize(
    module: nn.Module,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    sharding: ShardingConfig,
    unit_classes: Sequence[str] | None = None,
    min_num_params: int = MIN_NUM_PARAMS,
    tensor_parallel: TensorParallelConfig | None = None,
    pipeline: PipelineConfig | None = None,
    stage_to_stage: dist.ProcessGroup | None = None,
) -> ShardedModule:
    """Spread ``module`` over ``mesh`` as ``layout`` says, in place. A collective over all processes.

    Args:
        module: An ordinary module, on the mesh's device or (parts of it) on the meta device.
        layout: The sizes of the mesh's axes.
        mesh: From :meth:`ParallelLayout.build_mesh`.
        sharding: How parameters are sharded.
        unit_classes: Names of the block classes; None finds them.
        min_num_params: Size from which a module outside the blocks is sharded as one.
        tensor_parallel: How layers are split over ``tp``; None: as is found.
        pipeline: How the model is cut into stages; None: it is not.
        stage_to_stage: From :meth:`ParallelLayout.build_stage_to_stage_group`.

    Raises:
        ValueError: If the module is already sharded, has no module of a named class, or does not fit the plan.
        TypeError: If something on the meta device has no way to be initialised.
    """
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"The parameter {name!r} is already a DTensor: remove the fully_shard or parallelize_module calls from"
                " the LightningModule, or leave the strategy to them (Lightning's ModelParallelStrategy)."
            )
    units = find_units(module, unit_classes, min_num_params)
    if (sharding.recompute or sharding.compile_backend) and all(unit.kind != "block" for unit in units):
        asked = "activation_checkpointing" if sharding.recompute else "compile"
        raise ValueError(
            f"{asked} works on the model's repeated blocks, and {type(module).__name__} has none that could be found:"
            " name their classes as units=[...]."
        )
    for param in module.parameters():
        if not param.is_contiguous():  # such as channels_last, which FSDP2 does not take
            param.data = param.data.contiguous()
    stages, original = None, OriginalModule(module)
    if pipeline is not None:
        blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
        with raise_on_all_ranks("cutting the model into stages"):
            stages = find_stages(module, pipeline, blocks, torch.device(mesh.device_type))
        check_agreement("The split of the model into stages", str(sorted(stages.stages_of_param.items())))
    config = TensorParallelConfig() if tensor_parallel is None else tensor_parallel
    splitting = None
    if layout.tp > 1 or config.plan is not None:
        explicit = resolve_plan(module, config.plan)  # a name that matches nothing is wrong on one device, too
        if layout.tp > 1:
            plan = config.planned or _planned(module, units, explicit, config, mesh["tp"], layout.dp_shard)
            check_agreement("The plan of tensor parallelism", plan.outline())
            splitting = TensorParallel(module, plan, mesh["tp"], layout.dp_shard)
    broadcast_weights(module)
    seed = agreed_seed()
    on_cpu = mesh.device_type == "cpu"
    devices = [] if on_cpu else [torch.get_device_module(mesh.device_type).current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if on_cpu else mesh.device_type), torch.no_grad():
        torch.manual_seed(seed)
        sharding_mesh, parameter_mesh = layout.sharding_mesh(mesh), layout.parameter_mesh(mesh)
        if stages is None or pipeline is None or stage_to_stage is None:
            return shard(module, units, sharding_mesh, sharding, splitting, parameter_mesh)
        group = mesh["pp"].get_group()
        remote = drop_remote(module, stages, pipeline.stages_on(dist.get_rank(group)), units)
        own = own_units(units, remote)
        spread = shard(module, own, sharding_mesh, sharding, splitting, parameter_mesh, remote.tensors)
        device, part = torch.device(mesh.device_type), layout.data_parallel_rank(dist.get_rank())
        splits_backward = layout.tp == 1 and not sharding.recompute
        spread.pipeline = Pipeline(
            module, original, stages, pipeline, remote.parts, group, stage_to_stage, device, part, splits_backward
        )
        original.is_spread()
        return spread


def _planned(
    module: nn.Module,
    units: Sequence[Unit],
    explicit: Mapping[str, Entry],
    config: TensorParallelConfig,
    mesh: DeviceMesh,
    num_shards: int,
) -> Plan:
    """What is split, after a look at a step."""
    blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
    seen = StepTrace(None, config.why_no_step)
    if config.step is not None:
        provenance = Provenance(frozenset(blocks), module)
        device = torch.device(mesh.device_type)
        seen = StepTrace(provenance, run_on_fakes(module, config.step, device, provenance))
    return make_plan(
        module,
        blocks,
        explicit,
        seen,
        mesh,
        num_shards=num_shards,
        is_strict=config.is_strict,
        splits_sequence=config.sequence_parallel,
        splits_logits=config.loss_parallel,
    )
