"""Which stage each part and each parameter is on, and a model that has only those of its rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist import _compat
from lightning_dist.pipeline.balance import balanced, costs, split_by_hand
from lightning_dist.pipeline.follow import find_parts, trace_step
from lightning_dist.pipeline.graph import NotFollowedError, StepGraph, TraceError
from lightning_dist.pipeline.schedules import SCHEDULES, stages_of
from lightning_dist.tensor_places import put, tensor_places
from lightning_dist.units import Unit

__all__ = ["PipelineConfig", "RemoteParameters", "Stages", "drop_remote", "find_stages", "own_units"]


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is cut into stages and run.

    Args:
        pp_size: Number of ranks that stages are on.
        schedule: One of :data:`~lightning_dist.pipeline.schedules.SCHEDULES`.
        virtual_stages: Number of stages on a rank; None: the schedule's.
        num_microbatches: Number of microbatches that a rank's part of the batch is split into; 0 until it is chosen.
        split: The parts that each stage but the first begins with; None: balanced by cost.
        step: A step of the module on a microbatch, for :func:`~lightning_dist.pipeline.follow.trace_step`; None: none
            is known, and ``why_no_step`` says why.
        why_no_step: See ``step``.
        step_in_run: The step after the hooks that come before it, which may set what it reads; for where the step alone
            cannot be followed.
        has_loss: Whether the step must return a loss.
    """

    pp_size: int
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    num_microbatches: int = 1
    split: Sequence[str] | None = None
    step: Callable[..., Any] | None = None
    why_no_step: str = "no step is known"
    step_in_run: Callable[..., Any] | None = None
    has_loss: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}.")
        known = SCHEDULES[self.schedule]
        if self.virtual_stages is not None and (
            self.virtual_stages < known.virtual_stages
            or (self.virtual_stages > known.virtual_stages and not known.takes_many)
        ):
            at_least = "at least " if known.takes_many else ""
            raise ValueError(
                f"virtual_stages={self.virtual_stages} does not go with schedule={self.schedule!r}, of which a rank has"
                f" {at_least}{known.virtual_stages}."
            )

    @property
    def stages_per_rank(self) -> int:
        """How many stages a rank has."""
        return self.virtual_stages or SCHEDULES[self.schedule].virtual_stages

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return self.pp_size * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The place along ``pp`` where ``stage`` is."""
        return next(rank for rank in range(self.pp_size) if stage in self.stages_on(rank))

    def stages_on(self, rank: int) -> list[int]:
        """The stages of the ``rank``-th along ``pp``, in order."""
        return stages_of(rank, self.pp_size, self.stages_per_rank, SCHEDULES[self.schedule].is_v)


@dataclass(frozen=True)
class Stages:
    """A model cut into stages.

    Args:
        num_stages: How many.
        parts: Names of the parts, in the order of their first calls.
        blocks: Those of them that are blocks, by name.
        stages_of_part: The stages that a part is called on, in order.
        stages_of_param: Name of each parameter to the stages that it is needed on, in order; tied ones by their first
            name.
        costs: The share of the time of a step that each stage takes.
        graph: The step that was followed.
    """

    num_stages: int
    parts: list[str]
    blocks: Mapping[str, nn.Module]
    stages_of_part: Mapping[str, list[int]]
    stages_of_param: Mapping[str, list[int]]
    costs: list[float]
    graph: StepGraph

    def stages_of_calls(self, graph: StepGraph) -> list[int]:
        """The stage of each call of another step of the same model.

        Raises:
            TraceError: If it calls the parts in another order than the stages are in.
        """
        found: list[int] = []
        for call in graph.calls:
            at_least = found[-1] if found else 0
            later = [stage for stage in self.stages_of_part[call.name] if stage >= at_least]
            if not later:
                raise TraceError(
                    f"The step calls {call.name} after {graph.calls[len(found) - 1].name}, and its stage is before that"
                    " one's: a pipeline runs the parts of a model in one order, that of training_step."
                )
            found.append(later[0])
        return found

    def check_parameters(self, graph: StepGraph, calls: Sequence[int]) -> None:
        """See to it that each parameter is where another step of the same model needs it.

        Args:
            graph: The step.
            calls: The stage of each of its calls.

        Raises:
            TraceError: If one is not.
        """
        for call, stage in [*zip(graph.calls, calls, strict=True), (graph.end, self.num_stages - 1)]:
            missing = sorted(name for name in call.params if stage not in self.stages_of_param[name])
            if missing:
                raise TraceError(
                    f"The step uses {', '.join(missing[:3])} in {call.name}, on stage {stage}, and the step by which"
                    " the model was cut does not: they are on another stage. Use them in training_step as well,"
                    " if only times zero, or use a strategy without stages."
                )

    def check_hooks(self, graph: StepGraph, calls: Sequence[int]) -> None:
        """See to it that a hook on a tensor's gradient is there on each stage that makes something of the tensor.

        Args:
            graph: The step.
            calls: The stage of each of its calls.

        Raises:
            TraceError: If one is put there too late.
        """
        for values, num_before in graph.hooked:
            first = max(calls[:num_before], default=0)
            made = max((call for call, _ in values), default=num_before)
            for call, stage in list(zip(graph.calls, calls, strict=True))[made + 1 : num_before]:
                if stage < first and call.uses & values:
                    raise TraceError(
                        f"The step registers a hook on a tensor after {call.name} has used it, and that part is on an"
                        " earlier stage, which ends before: call register_hook as soon as the tensor is made."
                    )


def find_stages(
    root: nn.Module, config: PipelineConfig, blocks: Mapping[str, nn.Module], device: torch.device
) -> Stages:
    """Cut ``root`` into stages, and find out on which each parameter is needed. The same on all ranks.

    Args:
        root: The user's module, whole.
        config: How.
        blocks: Its repeated blocks.
        device: Where it is.

    Raises:
        TraceError: If the module or its step cannot be split.
        ValueError: If ``config.split`` does not fit the model.
    """
    if config.step is None:
        raise TraceError(
            "A pipeline must follow a step before it splits the model, and there is none to follow:"
            f" {config.why_no_step}."
        )

    def follow(step: Callable[..., Any]) -> tuple[list[str], dict[str, nn.Module], StepGraph]:
        parts = find_parts(root, step, device, blocks, 2 * config.num_stages)
        parts = _with_unused_blocks(parts, blocks)
        found = {name: block for name, block in blocks.items() if name in parts}
        return parts, found, trace_step(root, step, device, parts, found, config.has_loss)

    try:
        parts, blocks, graph = follow(config.step)
    except Exception as error:
        if config.step_in_run is None or (isinstance(error, TraceError) and not isinstance(error, NotFollowedError)):
            raise
        try:
            parts, blocks, graph = follow(config.step_in_run)
        except Exception:  # what the user knows of is the step alone
            raise error from error.__cause__
    called = costs(graph, root, config.num_microbatches)
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
    for place, name in enumerate(parts):  # a block that this step leaves out goes where its neighbours are
        if name in blocks and not of_part[name]:
            around = [of_part[part] for part in (*reversed(parts[:place]), *parts[place:]) if part in blocks]
            of_part[name] |= next((set(list(stages)[-1:]) for stages in around if stages), set())
    return Stages(
        config.num_stages,
        parts,
        blocks,
        {name: sorted(found) for name, found in of_part.items()},
        _stages_of_params(root, graph, stages, of_part, config.num_stages),
        shares,
        graph,
    )


def _with_unused_blocks(parts: list[str], blocks: Mapping[str, nn.Module]) -> list[str]:
    """Return ``parts`` with the blocks that the step has left out, each behind the one before it in the model."""
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
    # What this step does not use may be an auxiliary head, which some later step uses after the model.
    return {name: sorted(found or {num_stages - 1}) for name, found in needed.items()}


@dataclass(frozen=True)
class RemoteParameters:
    """What of a model is on other ranks only.

    Args:
        parts: Names of parts that do not run here.
        tensors: Parameters and buffers, on the meta device.
    """

    parts: frozenset[str]
    tensors: list[Tensor]


def drop_remote(root: nn.Module, stages: Stages, own: Sequence[int], units: Sequence[Unit]) -> RemoteParameters:
    """Move what is not needed on the stages ``own`` to the meta device.

    Parameters keep their names, and their identity where torch can swap their content. Buffers go with the part that
    they are in; those outside of parts stay everywhere.

    Args:
        root: The user's module, whole.
        stages: How it is cut.
        own: The stages of this rank.
        units: The model's units; parameters that could not keep their identity are replaced in them, too.
    """
    _compat.move_without_meta_tensors(root)
    wanted = set(own)
    tensors: list[Tensor] = []
    replaced: dict[int, nn.Parameter] = {}
    places = tensor_places(root)
    for name, param in root.named_parameters():
        if not wanted & set(stages.stages_of_param[name]):
            if not param.is_meta:
                meta = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                try:
                    torch.utils.swap_tensors(param, meta)  # type: ignore[no-untyped-call]
                except RuntimeError:
                    # Recurrent layers hold weak references to their weights, and the old weight_norm a graph of them.
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
            buffers: dict[str, Tensor | None] = module._buffers
            for key, buffer in buffers.items():
                if buffer is not None:
                    buffers[key] = torch.empty_like(buffer, device="meta")
                    tensors.append(buffers[key])  # type: ignore[arg-type]  # it is a tensor now
    return RemoteParameters(frozenset(remote), tensors)


def own_units(units: Sequence[Unit], remote: RemoteParameters) -> list[Unit]:
    """What is left of ``units`` without the parameters of others."""
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
