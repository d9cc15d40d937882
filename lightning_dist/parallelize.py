"""Make a module parallel by a list of techniques."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.deferred_init import deferred_init
from lightning_dist.model.initialization import agree_on_operations, agreed_seed, broadcast_weights
from lightning_dist.model.original_module import OriginalModule
from lightning_dist.model.units import MIN_NUM_PARAMS, Unit, find_units
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.parameters.scalar_reads import read_whole_scalars
from lightning_dist.techniques.activation_checkpointing import ActivationCheckpointing, CheckpointingMode
from lightning_dist.techniques.audit import FirstStepAudit
from lightning_dist.techniques.compilation import Compilation, CompileConfig
from lightning_dist.techniques.compression import Compression, CompressionConfig, LocalUpdates, SyncConfig
from lightning_dist.techniques.context_parallel import ContextParallel, ContextParallelConfig, find_context_plan
from lightning_dist.techniques.expert_parallel import ExpertParallel, ExpertPlan, find_expert_plan
from lightning_dist.techniques.float32_modules import Float32Modules, refuse_other_patterns
from lightning_dist.techniques.offload import Offload, OffloadConfig
from lightning_dist.techniques.pipeline import Pipeline, PipelineConfig
from lightning_dist.techniques.protocol import Technique
from lightning_dist.techniques.replicas import ReplicaComparison
from lightning_dist.techniques.replication import Replication
from lightning_dist.techniques.same_buffers import SameBuffers
from lightning_dist.techniques.scalars import Scalars
from lightning_dist.techniques.sharding import Sharding, ShardingConfig
from lightning_dist.techniques.step_in_backward import StepInBackward
from lightning_dist.techniques.tensor_parallel import TensorParallel, TensorParallelConfig, find_plan, resolve_plan
from lightning_dist.techniques.tiling import Tiling, TilingConfig, find_tiling_plan

__all__ = ["ParallelConfig", "parallelize"]


@dataclass(frozen=True)
class ParallelConfig:
    """Configure how a module is made parallel, apart from the sizes of the mesh.

    Args:
        units: Names of the block classes; None: they are found automatically.
        min_num_params: Number of parameters from which a module outside the blocks is sharded as one unit.
        sharding: Dtypes of the sharded parameters and gradients, and when gathered units are freed.
        keep_fp32: Patterns of names or classes of modules that run in float32 while the others run under autocast.
        activation_checkpointing: Which activations of blocks are kept for the backward, and where.
        compilation: How each block is compiled by torch.compile; None: none is compiled.
        check_replicas_every_n_steps: Number of optimizer steps after which replicas are compared; None: never.
        tensor_parallel: Options of the splitting of layers over ``tp``.
        context_parallel: Options of the splitting of sequences over ``cp``.
        tiling: What is computed a few tokens at a time.
        pipeline: Options of the pipeline; None: the module is not cut into stages.
        compression: Options of the compression of gradients; None: they are not compressed.
        sync: How replicas that train on their own are synchronized; None: they reduce their gradients in every step.
        offload: What is kept outside of the device's memory; None: nothing.
        step_in_backward: Whether optimizers update parameters while the backward runs.
        expert_capacity: Largest number of tokens that a rank sends to an expert; None: all are sent.
    """

    units: Sequence[str] | None = None
    min_num_params: int = MIN_NUM_PARAMS
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    keep_fp32: Sequence[str] = ()
    activation_checkpointing: CheckpointingMode = field(default_factory=CheckpointingMode)
    compilation: CompileConfig | None = None
    check_replicas_every_n_steps: int | None = None
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    tiling: TilingConfig = field(default_factory=TilingConfig)
    pipeline: PipelineConfig | None = None
    compression: CompressionConfig | None = None
    sync: SyncConfig | None = None
    offload: OffloadConfig | None = None
    step_in_backward: bool = False
    expert_capacity: int | None = None

    def __post_init__(self) -> None:
        """Refuse a capacity that is no number of tokens.

        Raises:
            ValueError: If ``expert_capacity`` is less than 1.
        """
        if self.expert_capacity is not None and (type(self.expert_capacity) is not int or self.expert_capacity < 1):
            raise ValueError(
                f"expert_capacity={self.expert_capacity!r} must be a number of tokens, 1 or more, or None for no limit."
            )

    def for_shards(self) -> dict[str, object]:
        """Return the arguments that differ from their defaults and have an effect only if parameters are sharded."""
        default = ParallelConfig()
        found = {
            "reshard_after_forward": (self.sharding.reshard_after_forward, default.sharding.reshard_after_forward),
            "direct_collectives": (self.sharding.direct_collectives, default.sharding.direct_collectives),
            "min_num_params": (self.min_num_params, default.min_num_params),
        }
        return {name: value for name, (value, ignored) in found.items() if value != ignored}


def parallelize(
    module: nn.Module,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    config: ParallelConfig,
    stage_to_stage: dist.ProcessGroup | None = None,
    context: dist.ProcessGroup | None = None,
) -> ParallelModule:
    """Make ``module`` parallel over ``mesh``, in place. This is a collective over all processes.

    Args:
        module: An ordinary module, on the mesh's device or completely or partly on the meta device.
        layout: The sizes of the mesh's axes.
        mesh: The mesh from :meth:`ParallelLayout.build_mesh`.
        config: Options of sharding, tensor parallelism, the pipeline and the other techniques.
        stage_to_stage: The process group from :meth:`ParallelLayout.build_stage_to_stage_group`; None: there is no
            pipeline.
        context: The process group from :meth:`ParallelLayout.build_context_group`; None: sequences are not split.

    Raises:
        ValueError: If the module is already sharded, has no module of a named class, or does not fit the plan.
        TypeError: If a tensor on the meta device cannot be initialised.
    """
    original = OriginalModule(module)
    read_whole_scalars()
    _refuse_dtensors(module)
    units = find_units(module, config.units, config.min_num_params, has_one_dtype=layout.num_shards > 1)
    _refuse_without_blocks(module, units, config)
    with deferred_init(torch.device(mesh.device_type)):
        for param in module.parameters():
            if not param.is_contiguous():  # FSDP2 does not accept other memory formats, such as channels_last.
                param.data = param.data.contiguous()
    agree_on_operations(module)
    techniques = _techniques(module, units, layout, mesh, config, stage_to_stage, context)
    refuse_other_patterns(module, config.keep_fp32)
    broadcast_weights(module)
    seed = agreed_seed()
    on_cpu = mesh.device_type == "cpu"
    devices = [] if on_cpu else [torch.get_device_module(mesh.device_type).current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if on_cpu else mesh.device_type), torch.no_grad():
        torch.manual_seed(seed)
        parallel = ParallelModule(module, units, techniques, layout.sharding_mesh(mesh, config.sync is not None))
    original.record_changes()
    if layout.world_size == layout.dp_replicate:
        original.allow_copies(module)
    return parallel


def _techniques(
    module: nn.Module,
    units: Sequence[Unit],
    layout: ParallelLayout,
    mesh: DeviceMesh,
    config: ParallelConfig,
    stage_to_stage: dist.ProcessGroup | None,
    context: dist.ProcessGroup | None,
) -> list[Technique]:
    """Return the techniques, from the outside in. This is a collective over all processes."""
    within_replica = config.sync is not None
    sharding_mesh = layout.sharding_mesh(mesh, within_replica)
    parameter_mesh = layout.parameter_mesh(mesh, within_replica)
    techniques: list[Technique] = [
        ReplicaComparison(mesh, config.check_replicas_every_n_steps),
        FirstStepAudit(),
        SameBuffers(sharding_mesh),
    ]
    if config.keep_fp32:  # The forwards must have changed before the traces of a step find dtypes.
        techniques.append(Float32Modules(module, config.keep_fp32, mesh.device_type))
    if config.pipeline is not None and stage_to_stage is not None:
        techniques.append(_pipeline(module, units, layout, mesh, config, stage_to_stage, parameter_mesh))
    if config.sync is not None:
        techniques.append(LocalUpdates(config.sync, layout.parameter_mesh(mesh)))
    if config.compression is not None:
        techniques.append(Compression(config.compression, sharding_mesh, parameter_mesh))
    if config.offload is not None:
        techniques.append(Offload(config.offload, mesh.device_type))
    if config.step_in_backward:
        techniques.append(StepInBackward())
    experts = _expert_plan(module, layout, mesh, config)
    if experts.forms:
        techniques += _of_experts(module, experts, layout, mesh, config)
    if layout.num_shards > 1:
        techniques.append(Scalars(parameter_mesh, parameter_mesh))  # FSDP2 does not accept scalars.
        techniques.append(Sharding(sharding_mesh, config.sharding))
    else:
        if layout.tp > 1:
            techniques.append(Scalars(sharding_mesh, layout.get_mesh(mesh, "tp")))
        techniques.append(Replication(sharding_mesh, parameter_mesh, config.sharding.reduce_dtype))
    if config.activation_checkpointing:
        techniques.append(ActivationCheckpointing(config.activation_checkpointing, units))
    if context is not None:
        device = torch.device(mesh.device_type)
        keeps_split = layout.tp == 1 and config.pipeline is None  # These split logits, and pass on outputs, themselves.
        sequence_plan = find_context_plan(module, units, config.context_parallel, context, device, keeps_split)
        splits_evaluations = config.context_parallel.splits_evaluations
        techniques.append(ContextParallel(sequence_plan, context, mesh.device_type, splits_evaluations))
    if config.tiling:
        tiling_plan = find_tiling_plan(module, units, config.tiling, torch.device(mesh.device_type))
        techniques.append(Tiling(config.tiling, tiling_plan))
    if layout.tp > 1:
        mesh_tp = layout.get_mesh(mesh, "tp")
        plan = find_plan(module, units, config.tensor_parallel, mesh_tp, layout.num_shards, experts.styles())
        techniques.append(TensorParallel(module, plan, mesh_tp, layout.num_shards, config.tensor_parallel.is_async))
    elif config.tensor_parallel.plan is not None:
        resolve_plan(module, config.tensor_parallel.plan)  # It raises if a name in the plan matches no module.
    if config.compilation is not None:
        techniques.append(Compilation(config.compilation))
    return techniques


def _pipeline(
    module: nn.Module,
    units: Sequence[Unit],
    layout: ParallelLayout,
    mesh: DeviceMesh,
    config: ParallelConfig,
    stage_to_stage: dist.ProcessGroup,
    same_stage: DeviceMesh,
) -> Pipeline:
    """Return the pipeline, which has traced a step."""
    assert config.pipeline is not None
    splits_backward = layout.tp == layout.ep == 1 and not config.activation_checkpointing
    group = layout.get_mesh(mesh, "pp").get_group()
    part = layout.data_parallel_rank(dist.get_rank())
    return Pipeline(module, config.pipeline, units, group, stage_to_stage, same_stage, part, splits_backward)


def _of_experts(
    module: nn.Module, plan: ExpertPlan, layout: ParallelLayout, mesh: DeviceMesh, config: ParallelConfig
) -> Iterator[Technique]:
    """Yield the techniques that distribute experts. This is a collective over all processes."""
    meshes = layout.expert_meshes(mesh, config.sync is not None)
    everyone = layout.build_expert_group(meshes[1])
    yield ExpertParallel(module, plan, *meshes, everyone, config.expert_capacity)
    stays_as_stored = config.offload is None and config.sharding.param_dtype is None
    if layout.num_shards > 1 and meshes[0].size() == 1 and stays_as_stored:
        yield Replication(*meshes, kind="experts")  # FSDP2 would copy them without need.


def _expert_plan(module: nn.Module, layout: ParallelLayout, mesh: DeviceMesh, config: ParallelConfig) -> ExpertPlan:
    """Return the plan by which experts are distributed over ``ep`` and ``tp``.

    Raises:
        ValueError: If experts cannot be distributed, or a capacity is given for experts that compute all tokens.
    """
    if layout.ep == layout.tp == 1:
        return ExpertPlan({}, {})
    user_plan = resolve_plan(module, config.tensor_parallel.plan)
    styles = {name: entry.style for name, entry in user_plan.items() if entry.source == "user"}
    device = torch.device(mesh.device_type)
    plan = find_expert_plan(module, layout.ep, layout.tp, device, styles, config.tensor_parallel.is_strict)
    dense = [name for name, form in plan.forms.items() if form == "dense"]
    if config.expert_capacity is not None and dense:
        raise ValueError(
            f"expert_capacity={config.expert_capacity}: each expert of {dense[0]}"
            f" ({type(module.get_submodule(dense[0])).__name__}) computes all tokens, so that none is left out. Use"
            " expert_capacity=None."
        )
    return plan


def _refuse_dtensors(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"The parameter {name!r} is already a DTensor: remove the fully_shard or parallelize_module calls from"
                " the LightningModule, or leave the strategy to them (Lightning's ModelParallelStrategy)."
            )


def _refuse_without_blocks(module: nn.Module, units: Sequence[Unit], config: ParallelConfig) -> None:
    asked = "activation_checkpointing" if config.activation_checkpointing else config.compilation and "compile"
    if asked and all(unit.kind != "block" for unit in units):
        raise ValueError(
            f"{asked} works on the model's repeated blocks, and {type(module).__name__} has none that could be found:"
            " name their classes as units=[...]."
        )
    if config.compilation is not None and config.activation_checkpointing.kind == "selective":
        raise ValueError(
            "activation_checkpointing='selective' with compile: a compiled block is one operation, so that none of its"
            " results could be kept. Use activation_checkpointing='full', {'every': k} or {'budget': b}, or leave"
            " compile out."
        )
