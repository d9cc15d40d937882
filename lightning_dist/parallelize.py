"""Make a module parallel by a list of techniques."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.mesh.groups import MeshGroups
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.deferred_init import deferred_init
from lightning_dist.model.initialization import agree_on_operations, agreed_seed, broadcast_weights
from lightning_dist.model.original_module import OriginalModule
from lightning_dist.model.units import find_units
from lightning_dist.parallel_module import ParallelModule
from lightning_dist.parameters.scalar_reads import read_whole_scalars
from lightning_dist.techniques.activation_checkpointing import CheckpointingOptions
from lightning_dist.techniques.audit import FirstStepAudit
from lightning_dist.techniques.compilation import CompileOptions
from lightning_dist.techniques.compression import CompressionOptions, SyncOptions
from lightning_dist.techniques.context_parallel import ContextParallelOptions
from lightning_dist.techniques.elastic import ElasticOptions
from lightning_dist.techniques.expert_parallel import ExpertOptions, ExpertParallel
from lightning_dist.techniques.float32_modules import Float32Modules, refuse_other_patterns
from lightning_dist.techniques.offload import OffloadOptions
from lightning_dist.techniques.options import Arguments, Build, PrecisionPolicy, StepSource, TechniqueOptions
from lightning_dist.techniques.pipeline import PipelineOptions
from lightning_dist.techniques.protocol import Technique
from lightning_dist.techniques.replicas import ReplicaOptions
from lightning_dist.techniques.replication import Replication
from lightning_dist.techniques.same_buffers import SameBuffers
from lightning_dist.techniques.scalars import Scalars
from lightning_dist.techniques.sharding import Sharding, ShardingOptions
from lightning_dist.techniques.step_in_backward import StepInBackwardOptions
from lightning_dist.techniques.tensor_parallel import TensorParallelOptions, resolve_plan
from lightning_dist.techniques.tiling import TilingOptions

__all__ = ["OPTIONS", "ParallelConfig", "check_change", "options_from", "parallelize", "register_options"]

_Options = TypeVar("_Options", bound=TechniqueOptions)


@dataclass(frozen=True)
class _Always(TechniqueOptions):
    """Build the techniques that no argument of a strategy asks for."""

    def techniques(self, build: Build) -> Iterator[Technique]:
        yield FirstStepAudit()
        yield SameBuffers(build.sharding_mesh)
        if build.precision.keep_fp32:  # The forwards must have changed before the traces of a step find dtypes.
            yield Float32Modules(build.module, build.precision.keep_fp32, build.mesh.device_type)


@dataclass(frozen=True)
class _Experts(ExpertOptions):
    """Build the techniques that distribute experts, and manage those that nothing shards."""

    def techniques(self, build: Build) -> Iterator[Technique]:
        layout = build.layout
        if layout.ep == layout.tp == 1:
            return
        user_plan = resolve_plan(build.module, build.arguments["plan"])
        plan = self.plan(build, {name: entry.style for name, entry in user_plan.items() if entry.source == "user"})
        build.claimed.update(plan.styles())
        if not plan.forms:
            return
        meshes = layout.expert_meshes(build.mesh, build.arguments.lets_replicas_differ)
        everyone = layout.build_expert_group(meshes[1])
        yield ExpertParallel(build.module, plan, *meshes, everyone, self.expert_capacity)
        stays_as_stored = build.arguments["offload"] is None and build.precision.param_dtype is None
        if layout.num_shards > 1 and meshes[0].size() == 1 and stays_as_stored:
            yield Replication(*meshes, kind="experts")  # FSDP2 would copy them without need.


@dataclass(frozen=True)
class _Parameters(ShardingOptions):
    """Build the techniques that manage parameters: sharded ones if there are ranks to shard over, else whole ones."""

    def techniques(self, build: Build) -> Iterator[Technique]:
        layout = build.layout
        if layout.num_shards > 1:
            yield Scalars(build.parameter_mesh, build.parameter_mesh)  # FSDP2 does not accept scalars.
            yield Sharding(build.sharding_mesh, self.config(build))
            return
        if layout.tp > 1:
            yield Scalars(build.sharding_mesh, layout.get_mesh(build.mesh, "tp"))
        yield Replication(build.sharding_mesh, build.parameter_mesh, build.precision.reduce_dtype)


OPTIONS: list[type[TechniqueOptions]] = [
    ReplicaOptions,
    _Always,
    ElasticOptions,
    PipelineOptions,
    SyncOptions,
    CompressionOptions,
    OffloadOptions,
    StepInBackwardOptions,
    _Experts,
    _Parameters,
    CheckpointingOptions,
    ContextParallelOptions,
    TilingOptions,
    TensorParallelOptions,
    CompileOptions,
]
"""The options of all techniques. Techniques are built in this order, which is the one from the outside in."""


def register_options(options: type[TechniqueOptions], *, outside_of: type[TechniqueOptions] | None = None) -> None:
    """Add the options of a technique, so that the strategies created from now on have its arguments.

    Args:
        options: The class of options, a frozen dataclass. Registering it again changes nothing.
        outside_of: The class in :data:`OPTIONS` before which the technique is built; None: it is built first, so that
            it is outside of all others.

    Raises:
        ValueError: If another technique has an argument of the same name.
    """
    if options in OPTIONS:
        return
    Arguments(one() for one in (*OPTIONS, options))
    OPTIONS.insert(0 if outside_of is None else OPTIONS.index(outside_of), options)


def options_from(values: Mapping[str, Any]) -> Arguments:
    """Return the options of all techniques for the arguments of a strategy.

    Args:
        values: The arguments that were given, by name.

    Raises:
        ValueError: If a value is wrong.
        TypeError: If no technique has an argument of a given name.
    """
    names = {name for kind in OPTIONS for name in kind.names()}
    for name in values:
        if name not in names:
            raise TypeError(f"No technique has an argument {name!r}; the arguments are {', '.join(sorted(names))}.")
    return Arguments(kind(**{name: values[name] for name in kind.names() if name in values}) for kind in OPTIONS)


@dataclass(frozen=True)
class ParallelConfig:
    """Configure how a module is made parallel, apart from the sizes of the mesh.

    Args:
        units: Names of the block classes; None: they are found automatically.
        arguments: The options of all techniques.
    """

    units: Sequence[str] | None = None
    arguments: Arguments = field(default_factory=lambda: options_from({}))


class _MadeWith(NamedTuple):
    """Hold what a module was made parallel with."""

    config: ParallelConfig
    layout: ParallelLayout
    precision: PrecisionPolicy


_made_with: WeakKeyDictionary[ParallelModule, _MadeWith] = WeakKeyDictionary()


def parallelize(
    module: nn.Module,
    layout: ParallelLayout,
    groups: MeshGroups,
    config: ParallelConfig,
    steps: StepSource,
    *,
    precision: PrecisionPolicy,
    scales_losses: bool,
    is_automatic: bool,
    copied: ParallelModule | None,
) -> ParallelModule:
    """Make ``module`` parallel over the mesh of ``groups``, in place. This is a collective over all processes.

    Args:
        module: An ordinary module, on the mesh's device or completely or partly on the meta device.
        layout: The sizes of the mesh's axes.
        groups: The mesh and the groups of ranks that follow from the layout.
        config: The options of all techniques.
        steps: The first step of the run, from which plans and stages are found.
        precision: The dtypes that parameters are computed and gradients are reduced in.
        scales_losses: Whether losses are scaled.
        is_automatic: Whether the loops step the optimizers, and not the module.
        copied: The parallel module whose module ``module`` is a copy of; None: it is no copy.

    Raises:
        ValueError: If the module is already sharded, has no module of a named class, or does not fit the plan.
        TypeError: If a tensor on the meta device cannot be initialised.
    """
    mesh, arguments, original = groups.mesh, config.arguments, OriginalModule(module)
    read_whole_scalars()
    _refuse_dtensors(module)
    units = find_units(module, config.units, arguments["min_num_params"], has_one_dtype=layout.num_shards > 1)
    _make_contiguous(module, mesh)
    agree_on_operations(module)
    within_replica = arguments.lets_replicas_differ and copied is None
    build = Build(
        module=module,
        units=units,
        layout=layout,
        groups=groups,
        sharding_mesh=layout.sharding_mesh(mesh, within_replica),
        parameter_mesh=layout.parameter_mesh(mesh, within_replica),
        arguments=arguments,
        steps=steps,
        copied=copied,
        precision=precision,
        scales_losses=scales_losses,
        is_automatic=is_automatic,
    )
    techniques = [technique for options in arguments.options for technique in options.techniques(build)]
    refuse_other_patterns(module, precision.keep_fp32)
    broadcast_weights(module)
    with _same_random_numbers(mesh):
        parallel = ParallelModule(module, units, techniques, build.sharding_mesh)
    _made_with[parallel] = _MadeWith(config, layout, precision)
    original.record_changes()
    if layout.world_size == layout.dp_replicate:
        original.allow_copies(module, kept=parallel)  # Modules without hooks do not hold it themselves.
    return parallel


def _make_contiguous(module: nn.Module, mesh: DeviceMesh) -> None:
    with deferred_init(torch.device(mesh.device_type)):
        for param in module.parameters():
            if not param.is_contiguous():  # FSDP2 does not accept other memory formats, such as channels_last.
                param.data = param.data.contiguous()


@contextmanager
def _same_random_numbers(mesh: DeviceMesh) -> Iterator[None]:
    """Let all ranks draw the same random numbers in this context, for initial values. This is a collective."""
    seed = agreed_seed()
    on_cpu = mesh.device_type == "cpu"
    devices = [] if on_cpu else [torch.get_device_module(mesh.device_type).current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if on_cpu else mesh.device_type), torch.no_grad():
        torch.manual_seed(seed)
        yield


def check_change(
    existing: ParallelModule,
    config: ParallelConfig,
    layout: ParallelLayout,
    precision: PrecisionPolicy,
    *,
    is_fit: bool,
) -> None:
    """Check that a module that is parallel already has been made so by the same arguments.

    Args:
        existing: The module as an earlier call of :func:`parallelize` has made it.
        config: The options of all techniques that are asked for now.
        layout: The sizes of the mesh's axes that are asked for now.
        precision: The dtypes that are asked for now.
        is_fit: Whether the module is trained now. In evaluations, arguments may differ that concern training alone.

    Raises:
        ValueError: If an argument, the size of an axis or a dtype would have to be changed.
    """
    refuse_other_patterns(existing.module, precision.keep_fp32)
    before = _made_with[existing]
    changes: list[tuple[str, Any, Any]] = [
        ("layout", str(before.layout), str(layout)),
        ("ep_size", before.layout.ep, layout.ep),
        ("units", _listed(before.config.units), _listed(config.units)),
    ]
    if layout.num_shards > 1:  # Otherwise the precision plugin chooses the dtype of each step.
        changes.append(("param_dtype", before.precision.param_dtype, precision.param_dtype))
    if is_fit:
        changes.append(("reduce_dtype", before.precision.reduce_dtype, precision.reduce_dtype))
    for now in config.arguments.options:
        then = next((one for one in before.config.arguments.options if type(one) is type(now)), type(now)())
        if is_fit or not now.is_for_training:
            changes += _effective(now, layout).changes(_effective(then, layout), existing)
    for name, value, wanted in changes:
        if value != wanted:
            raise ValueError(
                f"An earlier Trainer has made this {type(existing.module).__name__} parallel with {name}={value}, which"
                f" cannot be changed to {wanted}. Make a new one, and load the weights from a checkpoint."
            )


def _listed(units: Sequence[str] | None) -> list[str] | None:
    return None if units is None else list(units)


def _effective(options: _Options, layout: ParallelLayout) -> _Options:
    """Return the options, or those by default if what was given can have no effect."""
    return options if options.has_effect(layout) else type(options)()


def _refuse_dtensors(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"The parameter {name!r} is already a DTensor: remove the fully_shard or parallelize_module calls from"
                " the LightningModule, or leave the strategy to them (Lightning's ModelParallelStrategy)."
            )
