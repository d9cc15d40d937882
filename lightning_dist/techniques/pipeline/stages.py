"""Decide on which stage each part and each parameter is, and remove the tensors of other ranks from a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist import _compat
from lightning_dist.model.tensor_places import put, tensor_places
from lightning_dist.model.tensor_state import is_uninitialized
from lightning_dist.model.units import Unit
from lightning_dist.techniques.options import StepOnMicrobatch
from lightning_dist.techniques.pipeline.balance import balanced, costs, split_by_hand
from lightning_dist.techniques.pipeline.holders import without_holder_records
from lightning_dist.techniques.pipeline.schedules import SCHEDULES, stages_of
from lightning_dist.tracing.step_graph import (
    LoopByValueError,
    NotTraceableError,
    RepeatedCallsError,
    StepGraph,
    TraceError,
    find_parts,
    trace_first_calls,
    trace_step,
)

__all__ = ["PipelineConfig", "RemoteParameters", "Stages", "drop_remote", "find_stages", "own_units"]


@dataclass(frozen=True)
class PipelineConfig:
    """Say how a model is cut into stages, and how they run.

    Args:
        pp_size: The number of ranks of the pipeline.
        schedule: The name of a schedule in :data:`~lightning_dist.techniques.pipeline.schedules.SCHEDULES`.
        virtual_stages: The number of stages on a rank; None: the schedule's default.
        split: The names of the parts with which the stages after the first begin; None: the stages are balanced by
            cost.
        first: The step on a microbatch that is traced to cut the model.
    """

    pp_size: int
    schedule: str
    virtual_stages: int | None
    split: Sequence[str] | None
    first: StepOnMicrobatch

    @property
    def stages_per_rank(self) -> int:
        """Return the number of stages on each rank."""
        return self.virtual_stages or SCHEDULES[self.schedule].virtual_stages

    @property
    def num_stages(self) -> int:
        """Return the number of stages on all ranks."""
        return self.pp_size * self.stages_per_rank

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches into which a rank's batch is split."""
        return self.first.num_microbatches

    @property
    def description(self) -> str:
        """Return the schedule and the number of microbatches, in words."""
        return f"{self.schedule}, {self.num_microbatches} microbatches of a rank's batch"

    @property
    def in_turn(self) -> bool:
        """Return whether steps run their own backwards, so that the stages work in turn (see :mod:`.in_turn`)."""
        return self.first.in_turn

    def rank_of(self, stage: int) -> int:
        """Return the index along ``pp`` of the rank that has ``stage``."""
        return next(rank for rank in range(self.pp_size) if stage in self.stages_on(rank))

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages on the rank with the index ``rank`` along ``pp``, in order."""
        return stages_of(rank, self.pp_size, self.stages_per_rank, SCHEDULES[self.schedule].is_v)


@dataclass(frozen=True)
class Stages:
    """Describe how a model is cut into stages.

    Args:
        num_stages: Number of stages of the pipeline, over all ranks.
        parts: The names of the parts, in the order of their first calls.
        blocks: The parts that are repeated blocks, by name.
        stages_of_part: For each part, the stages on which it is called, in order.
        stages_of_param: For each parameter, the stages that need it, in order. A tied parameter has its first name.
        costs: For each stage, its estimated fraction of the time of a step.
        graph: The graph of the step by which the model was cut.
    """

    num_stages: int
    parts: list[str]
    blocks: Mapping[str, nn.Module]
    stages_of_part: Mapping[str, list[int]]
    stages_of_param: Mapping[str, list[int]]
    costs: list[float]
    graph: StepGraph

    def stages_of_calls(self, graph: StepGraph) -> list[int]:
        """Return the stage of each call of a part in another step of the same model.

        Args:
            graph: The graph of that step.

        Raises:
            TraceError: If the step calls the parts in an order that does not follow the order of the stages.
        """
        found: list[int] = []
        for call in graph.calls:
            at_least = found[-1] if found else 0
            later = [stage for stage in self.stages_of_part[call.name] if stage >= at_least]
            if not later:
                raise TraceError(
                    f"The step calls {call.name} after {graph.calls[len(found) - 1].name}, which is on a later stage: a"
                    " pipeline runs the parts of a model in one order, that of training_step."
                )
            found.append(later[0])
        return found

    def check_parameters(self, graph: StepGraph, calls: Sequence[int]) -> None:
        """Check that each stage has the parameters that it needs in another step of the same model.

        Args:
            graph: The graph of that step.
            calls: The result of :meth:`stages_of_calls` for ``graph``.

        Raises:
            TraceError: If a stage lacks a parameter.
        """
        for call, stage in [*zip(graph.calls, calls, strict=True), (graph.end, self.num_stages - 1)]:
            missing = sorted(name for name in call.params if stage not in self.stages_of_param[name])
            if missing:
                raise TraceError(
                    f"The step uses {', '.join(missing[:3])} in {call.name} on stage {stage}, which does not have them,"
                    " because the step by which the model was cut does not use them there. Use them in training_step as"
                    " well, if only multiplied by zero, or use a strategy without stages."
                )

    def check_hooks(self, graph: StepGraph, calls: Sequence[int]) -> None:
        """Check that every stage that uses a tensor with a gradient hook runs the code that registers the hook.

        Args:
            graph: Graph of the step, with the tensors on which it registers gradient hooks.
            calls: The result of :meth:`stages_of_calls` for ``graph``.

        Raises:
            TraceError: If the step registers a hook only after an earlier stage, which uses the tensor, has ended.
        """
        for values, num_before in graph.hooked:
            first = max(calls[:num_before], default=0)
            made = max((call for call, _ in values), default=num_before)
            for call, stage in list(zip(graph.calls, calls, strict=True))[made + 1 : num_before]:
                if stage < first and call.uses & values:
                    raise TraceError(
                        f"The step registers a hook on a tensor after {call.name} has used the tensor. That part is on"
                        " an earlier stage, which ends before: call register_hook as soon as the tensor is made."
                    )


_Traced = tuple[list[str], dict[str, nn.Module], StepGraph]
"""The names of the parts, the blocks among them, and the graph of the step."""


def find_stages(
    root: nn.Module, config: PipelineConfig, blocks: Mapping[str, nn.Module], device: torch.device
) -> Stages:
    """Cut ``root`` into stages, and find out which stages need each parameter. The result is the same on all ranks.

    Args:
        root: The user's module with the parameters of all stages.
        config: Number of stages, the step to trace, and the user's split if there is one.
        blocks: The repeated blocks of the module, by full name.
        device: The device of the fake tensors with which the step is traced.

    Raises:
        TraceError: If the module or its step cannot be split into stages.
        ValueError: If ``config.split`` does not fit the model.
    """
    parts, blocks, graph = _traced(root, config, blocks, device)
    called = costs(graph, root, 1 / config.num_microbatches)
    names = [call.name for call in graph.calls]
    if config.split is not None:
        stages = split_by_hand(names, config.split, config.num_stages, [name for name, _ in root.named_modules()])
    else:
        stages = balanced(called, [name in blocks for name in names], config.num_stages)
    total = sum(called)
    shares = [sum(c for c, at in zip(called, stages, strict=True) if at == s) / total for s in range(config.num_stages)]
    of_part: dict[str, set[int]] = {name: set() for name in parts}
    for name, stage in zip(names, stages, strict=True):
        of_part[name].add(stage)
    for place, name in enumerate(parts):  # A block that this step leaves out goes to the stage of its neighbours.
        if name in blocks and not of_part[name]:
            before = [max(of_part[part]) for part in reversed(parts[:place]) if part in blocks and of_part[part]]
            after = [min(of_part[part]) for part in parts[place:] if part in blocks and of_part[part]]
            of_part[name].update([*before, *after][:1])
        elif not of_part[name] and config.in_turn:
            of_part[name].add(config.num_stages - 1)
    return Stages(
        config.num_stages,
        parts,
        blocks,
        {name: sorted(found) for name, found in of_part.items()},
        _stages_of_params(root, graph, stages, of_part, config.num_stages),
        shares,
        graph,
    )


def _traced(root: nn.Module, config: PipelineConfig, blocks: Mapping[str, nn.Module], device: torch.device) -> _Traced:
    """Trace the step of ``config``, with the arguments of :func:`find_stages`.

    Raises:
        TraceError: If the step cannot be split into stages, or there is none.
    """
    if config.first.step is None:
        raise TraceError(
            "A pipeline must trace a step before it splits the model, and there is none to trace:"
            f" {config.first.why_no_step}."
        )

    def trace(step: Callable[..., Any], is_first_pass_only: bool = False) -> _Traced:
        parts = find_parts(root, step, device, blocks, 2 * config.num_stages, is_first_pass_only)
        parts = _with_unused_blocks(parts, blocks)
        if config.in_turn:
            parts += _not_called(root, parts)
            found = {name: block for name, block in blocks.items() if name in parts}
            return parts, found, trace_first_calls(root, step, device, parts, found)
        found = {name: block for name, block in blocks.items() if name in parts}
        return parts, found, trace_step(root, step, device, parts, found, config.first.has_loss, is_first_pass_only)

    def trace_one_pass(step: Callable[..., Any]) -> _Traced:
        try:
            return trace(step)
        except (LoopByValueError, RepeatedCallsError):
            if config.first.has_loss:
                raise
            return trace(step, is_first_pass_only=True)  # Such an evaluation runs on the whole model.

    try:
        return trace_one_pass(config.first.step)
    except Exception as error:
        if config.first.step_in_run is None or (
            isinstance(error, TraceError) and not isinstance(error, NotTraceableError)
        ):
            raise
        try:
            return trace_one_pass(config.first.step_in_run)
        except Exception:  # The first error is raised, because it is of the step without hooks.
            raise error from error.__cause__


def _with_unused_blocks(parts: list[str], blocks: Mapping[str, nn.Module]) -> list[str]:
    """Return ``parts`` with the blocks that the step does not call inserted after the preceding blocks of the model."""
    found = list(parts)
    before: str | None = None
    for name in blocks:
        same_container = before is not None and before.rpartition(".")[0] == name.rpartition(".")[0]
        if name not in found and same_container and before in found:
            found.insert(found.index(before) + 1, name)
        elif name not in found:
            following = [part for part in parts if part.rpartition(".")[0] == name.rpartition(".")[0]]
            if following:
                found.insert(found.index(following[0]), name)
        before = name
    return found


def _not_called(root: nn.Module, parts: Sequence[str]) -> list[str]:
    """Return the outermost modules with parameters that neither are in a part nor contain one.

    A step of another batch may call them.
    """
    found: list[str] = []
    for name, module in root.named_modules():
        is_inside = any(f"{name}.".startswith(f"{part}.") for part in (*parts, *found))
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        contains = not name or is_container or any(part.startswith(f"{name}.") for part in parts)
        if not is_inside and not contains and any(True for _ in module.parameters()):
            found.append(name)
    return found


def _stages_of_params(
    root: nn.Module, graph: StepGraph, stages: Sequence[int], of_part: Mapping[str, set[int]], num_stages: int
) -> dict[str, list[int]]:
    first_name = {param: name for name, param in root.named_parameters()}
    needed: dict[str, set[int]] = {name: set() for name in first_name.values()}
    for call, stage in zip(graph.calls, stages, strict=True):
        for name in call.params:
            needed[name].add(stage)
    for name in graph.end.params:
        needed[name].add(num_stages - 1)
    for name, param in root.named_parameters(remove_duplicate=False):
        part = next((part for part in of_part if name.startswith(f"{part}.")), None)
        if part is not None and (of_part[part] or not needed[first_name[param]]):
            needed[first_name[param]] |= of_part[part] or {0}
    # A parameter that this step does not use may belong to an auxiliary head, which a later step uses after the model.
    return {name: sorted(found or {num_stages - 1}) for name, found in needed.items()}


@dataclass(frozen=True)
class RemoteParameters:
    """Describe which parts and tensors of a model are on other ranks only.

    Args:
        parts: The names of the parts that do not run on this rank.
        tensors: The parameters and buffers of other ranks, on the meta device.
    """

    parts: frozenset[str]
    tensors: list[Tensor]


def drop_remote(root: nn.Module, stages: Stages, own: Sequence[int], units: Sequence[Unit]) -> RemoteParameters:
    """Move the parameters and buffers that this rank's stages do not need to the meta device, and return them.

    Parameters keep their names, and also their identity if torch can swap their content. Buffers are moved with the
    part that they are in; those outside of parts remain on every rank.

    Args:
        root: The user's module with the parameters of all stages.
        stages: Assignment of the model's parts and parameters to stages.
        own: The indices of this rank's stages.
        units: The model's units, in which parameters that could not keep their identity are replaced as well.

    Returns:
        The parts that do not run on this rank, and the tensors that are now on the meta device.
    """
    _compat.move_without_meta_tensors(root, partial(without_holder_records, root))
    wanted = set(own)
    tensors: list[Tensor] = []
    replaced: dict[int, nn.Parameter] = {}
    places = tensor_places(root)
    for name, param in root.named_parameters():
        if not wanted & set(stages.stages_of_param[name]):
            if not is_uninitialized(param):
                meta = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                try:
                    torch.utils.swap_tensors(param, meta)  # type: ignore[no-untyped-call]
                except RuntimeError:
                    # Tensors with weak references or an autograd graph cannot be swapped: recurrent layers hold weak
                    # references to their weights, and the old weight_norm an autograd graph of them.
                    replaced[id(param)] = meta
                    put(meta, places[id(param)])
            tensors.append(replaced.get(id(param), param))
    for unit in units:
        unit.params.update({name: replaced[id(param)] for name, param in unit.params.items() if id(param) in replaced})
    remote = set()
    modules = dict(root.named_modules())
    for part in stages.parts:
        if wanted & set(stages.stages_of_part[part]):
            continue
        remote.add(part)
        for module in modules[part].modules():
            buffers: dict[str, Tensor | None] = _compat.own_buffers(module)
            for key, buffer in buffers.items():
                if buffer is not None:
                    buffers[key] = torch.empty_like(buffer, device="meta")
                    tensors.append(buffers[key])  # type: ignore[arg-type]  # The buffer is not None here.
    return RemoteParameters(frozenset(remote), tensors)


def own_units(units: Sequence[Unit], remote: RemoteParameters) -> list[Unit]:
    """Return ``units`` without the parameters of other ranks, and without units that have no parameter on this rank.

    Args:
        units: The units of the whole model, in which :func:`drop_remote` has replaced parameters.
        remote: The result of :func:`drop_remote`.
    """
    others = {id(tensor) for tensor in remote.tensors}
    own = []
    for unit in units:
        params = {name: param for name, param in unit.params.items() if id(param) not in others}
        if not params:
            continue
        ids = {id(param) for param in params.values()}
        owners = {owner for owner in unit.owners if any(id(p) in ids for p in owner.parameters(recurse=False))}
        kept = [m for m in unit.modules if any(id(p) in ids for p in m.parameters())]
        names = [name for name, m in zip(unit.names, unit.modules, strict=True) if m in kept]
        own.append(Unit(unit.kind, names, kept, params, owners))
    return own
