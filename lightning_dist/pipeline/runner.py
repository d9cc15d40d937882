"""Run a pipeline's steps: pass microbatches through this rank's stages in the order of one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lightning_dist.consensus import check_agreement, raise_on_all_ranks
from lightning_dist.initialization import broadcast_tensors
from lightning_dist.pipeline.attributes import unchanged
from lightning_dist.pipeline.buffers import BuffersOfStep
from lightning_dist.pipeline.failures import Failure
from lightning_dist.pipeline.original_module import OriginalModule
from lightning_dist.pipeline.outside_of_steps import AllStages
from lightning_dist.pipeline.replay import MicrobatchSeed, Replay, StagePlan
from lightning_dist.pipeline.schedules import SCHEDULES
from lightning_dist.pipeline.shared import SharedParameters
from lightning_dist.pipeline.simulation import order_of
from lightning_dist.pipeline.stages import PipelineConfig, drop_remote, find_stages, own_units
from lightning_dist.pipeline.timeline import Order, Recorder, TimedStage, Timeline
from lightning_dist.pipeline.whole_model import whole_model
from lightning_dist.pipeline.whole_state import optimizer_state_of_all, written_by_stage
from lightning_dist.step_graph import KnownPaths, Leaf, Readable, StepGraph
from lightning_dist.technique import Rows, Technique
from lightning_dist.tensor_state import is_remote
from lightning_dist.units import Unit

__all__ = ["Pipeline", "PreparedStep", "Ran", "RunRoot"]

_MOST_PREPARED = 4
"""Maximum number of prepared steps, such as those for other shapes of batches, that are kept.

The schedule of each has receive buffers for all its microbatches.
"""

RunRoot = Callable[[Callable[[], Any]], Any]
"""Function that runs a given function as a forward of the whole module, and returns its result."""


@dataclass(frozen=True)
class PreparedStep:
    """Hold the graph of a step, the plans of this rank's stages for it, and the schedule that runs them.

    Args:
        graph: The graph of the step.
        plans: The plan of each stage of this rank, by the stage's index.
        schedule: torch's schedule; None for a step without backwards.
        order: The actions of each rank in the order of the schedule; empty for a step without backwards.
    """

    graph: StepGraph
    plans: dict[int, StagePlan]
    schedule: Any
    order: Order = ()


@dataclass(frozen=True)
class Ran:
    """Hold the outcome of a step on this rank.

    Args:
        results: What the step returned on each microbatch; empty on ranks without the last stage.
        at_end: For each microbatch, the values that :meth:`Pipeline.values_at_end` describes, or no values if the graph
            has no ``of_whole_batch``; empty on ranks without the last stage.
        failure: The first error on this rank, or None.
        buffers: Copies from before the step of the buffers that each microbatch began with.
    """

    results: list[Any]
    at_end: list[tuple[Tensor, ...]]
    failure: Failure | None
    buffers: BuffersOfStep


@dataclass
class _Running:
    """Hold the state of a step while it runs.

    Args:
        plans: The plan of each stage of this rank, by the stage's index.
        steps: The user's step on each microbatch, with its arguments bound.
        run_root: Function that runs a given function as a forward of the whole module.
        loss_of: Function from what the step returned to the tensor at which the backward begins; None: there is no
            backward.
        base: The seed from which the seeds of all microbatches are derived.
        results: What the step returned on each microbatch; empty on ranks without the last stage.
        buffers: Copies from before the step of the buffers that are restored at the beginning of each microbatch.
        at_end: For each microbatch, the values from which the end of the step on the whole batch is computed; empty on
            ranks without the last stage.
        failure: The first error that was raised on this rank, or None. After an error, this rank's stages compute
            nothing, and only take part in the schedule's communication.
    """

    plans: dict[int, StagePlan]
    steps: Sequence[Callable[[], Any]]
    run_root: RunRoot
    loss_of: Callable[[Any], Tensor] | None
    base: int
    results: list[Any]
    buffers: BuffersOfStep
    at_end: list[tuple[Tensor, ...]]
    failure: Failure | None = None


class Pipeline(Technique):
    """Cut a module into stages, and run its steps on the stages of this rank.

    Building it is a collective over all processes.

    Args:
        root: The user's module with the parameters of all stages, before it is changed in any way.
        config: The configuration of the pipeline.
        units: The module's units.
        group: Process group of the pipeline's ranks, for collectives.
        stage_to_stage: Process group of the same ranks, for sends and receives.
        parameter_mesh: Device mesh of the ranks that have the same stages.
        data_parallel_rank: The index of this rank's part of the batch.
        splits_backward: Whether a schedule may compute the gradients of weights later than those of inputs. For this,
            torch looks for the module's parameters among the leaves of the autograd graph, and runs the nodes between
            them and the inputs twice. The leaves must therefore be the module's parameters, and activation
            checkpointing must not recompute blocks.

    Raises:
        OtherRankError: If the module cannot be cut on another rank, or is cut differently there.
    """

    runs_before_first_step = False

    def __init__(
        self,
        root: nn.Module,
        config: PipelineConfig,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        stage_to_stage: dist.ProcessGroup,
        parameter_mesh: DeviceMesh,
        data_parallel_rank: int,
        splits_backward: bool = True,
    ) -> None:
        device = torch.device(parameter_mesh.device_type)
        self._original_module = OriginalModule(root)
        blocks = {unit.names[0]: unit.modules[0] for unit in units if unit.kind == "block"}
        with raise_on_all_ranks("cutting the model into stages"):
            self.stages = find_stages(root, config, blocks, device)
        check_agreement("The split of the model into stages", str(sorted(self.stages.stages_of_param.items())))
        self.config = config
        self.group = group
        self._stage_to_stage = stage_to_stage
        self.own_stages = config.stages_on(dist.get_rank(group))
        self.is_last = self.stages.num_stages - 1 in self.own_stages
        self.last_rank = config.rank_of(self.stages.num_stages - 1)
        self._splits_backward = splits_backward
        self._root = root
        self._device = device
        self._mesh = parameter_mesh
        self._data_parallel_rank = data_parallel_rank
        self.readable: Readable = {}
        """The classes other than modules whose attributes a step's path may depend on."""
        self._paths: dict[object, KnownPaths] = {}
        self._prepared: dict[object, PreparedStep] = {}
        self._recorder = Recorder(device)
        self.order: Order = ()
        self._running: _Running | None = None
        self.runs_last_stage = False
        """Whether the stage that runs now, or ran last, is the last one. Only its run of a step counts."""

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Move what only other ranks' stages need to the meta device, and return the units that this rank has."""
        self._remote = drop_remote(self._root, self.stages, self.own_stages, units)
        return own_units(units, self._remote)

    def remote_tensors(self) -> Collection[Tensor]:
        """Return the parameters and buffers of other ranks' stages, which are on the meta device here."""
        return self._remote.tensors

    def finish(self) -> None:
        """Route the calls of parts to the replay of this rank's stages, now that the units have their groups."""
        modules = dict(self._root.named_modules())
        parts = {name: modules[name] for name in self.stages.parts}
        self._replay = Replay(self._root, parts, self._remote.parts, self._device)
        self.shared = SharedParameters(self._root, self.stages, self.config, self._stage_to_stage)
        self.all_stages = AllStages(self._root, self._holders(), self.group, self._device)
        self._original_module.is_spread()

    def after_microbatches(self, reduces: bool) -> None:
        """Sum the gradients of parameters that several stages share, if gradients are reduced now.

        A collective over ``pp`` in that case.

        Args:
            reduces: Whether gradients are reduced now, and not only added up.
        """
        if reduces:
            self.shared.sum_gradients()

    def without_hook_views(self) -> AbstractContextManager[None]:
        """Return a context in which hooks, too, see the parameters of other stages as meta tensors."""
        return self.all_stages.switched_off()

    def table_rows(self) -> Rows:
        """Return the rows of the start-up table that show on which ranks the stages are, and how they are run."""
        for stage, share in enumerate(self.stages.costs):
            parts = [part for part in self.stages.parts if stage in self.stages.stages_of_part[part]]
            span = parts[0] if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
            where = f"{stage} on {self.config.rank_of(stage)}"
            yield "" if stage else "stages", f"{where}: {span}, {share:.0%} of the time as estimated"
        shared = sum(len(needed) > 1 for needed in self.stages.stages_of_param.values())
        if shared:
            yield "", f"{shared} parameters are on several stages, their gradients summed"
        yield "schedule", f"{self.config.schedule}, {self.config.num_microbatches} microbatches of a rank's batch"

    def known_path(self, key: object, arguments: Sequence[Any] = ()) -> int:
        """Return the number of the known path that a step takes on this rank, or -1 if it must be traced.

        Args:
            key: Hashable key of everything that the path of every step depends on.
            arguments: The arguments of the step after its batch, on which its path may depend.
        """
        return self._paths.setdefault(key, KnownPaths(self._root, self.readable)).taken(arguments)

    def trace(self, key: object, trace: Callable[[Sequence[Any]], StepGraph], arguments: Sequence[Any] = ()) -> int:
        """Trace a step, and return the number of a known path that is equal to its path, or -1 if there is none.

        Args:
            key: The key for which :meth:`known_path` was called before.
            trace: Function that traces the step on a microbatch with the arguments that it is given.
            arguments: The arguments of the step after its batch.
        """
        return self._paths[key].trace(arguments, trace)

    def prepare(
        self, key: object, path: int, is_traced: bool, num_microbatches: int, has_backward: bool
    ) -> PreparedStep:
        """Plan how a step runs on the stages, or return the plan of an earlier step that took the same path.

        Args:
            key: The key for which :meth:`known_path` was called before.
            path: The number of the step's path, on which all ranks of the pipeline agree, or -1 if the path is new.
            is_traced: Whether :meth:`trace` has just traced the step.
            num_microbatches: The number of microbatches.
            has_backward: Whether a backward is run for each microbatch.
        """
        paths = self._paths[key]
        graph = paths.remember(path) if is_traced else paths.known(path)
        whole_key = (id(graph), num_microbatches, has_backward)
        prepared = self._prepared.pop(whole_key, None)
        if prepared is None or prepared.graph is not graph:
            prepared = self._prepare(graph, num_microbatches, has_backward)
        self._prepared[whole_key] = prepared  # The dict is in the order of use, and its first entry is dropped.
        if len(self._prepared) > _MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    def run(
        self,
        prepared: PreparedStep,
        steps: Sequence[Callable[[], Any]],
        run_root: RunRoot,
        loss_of: Callable[[Any], Tensor] | None = None,
    ) -> Ran:
        """Run the microbatches of a step, and their backwards if there is a loss. A collective over ``pp``.

        An error of the user's code is not raised, but returned after the schedule has run to its end, because the other
        ranks would wait for what this rank sends. The caller raises it on all ranks.

        Args:
            prepared: The prepared step, for the same number of microbatches.
            steps: The user's step on each microbatch, with its arguments bound.
            run_root: Function that runs a given function as a forward of the whole module.
            loss_of: Function from what the step returned on a microbatch to the microbatch's part of the loss; None:
                there is no backward.

        Returns:
            The outcome of the step on this rank.
        """
        # The generator has the same state on all ranks of the pipeline, and after a resume.
        base = int(torch.randint(2**62, ()))
        results = [None] * len(steps) if self.is_last else []
        buffers = BuffersOfStep(self._root, prepared.graph.steady_buffers | prepared.graph.buffers_between)
        at_end: list[tuple[Tensor, ...]] = [()] * len(results)
        running = self._running = _Running(prepared.plans, steps, run_root, loss_of, base, results, buffers, at_end)
        if loss_of is not None:
            self.order = prepared.order
            self._recorder.begin()
            self.shared.will_run(prepared.graph)
        numbers = torch.arange(len(steps))
        try:
            with (
                self._replay.numbers_kept(prepared.graph),
                self._replay.stand_in_parameters(prepared.graph.params_between),
            ):
                if loss_of is not None:
                    prepared.schedule.step(microbatch=numbers, target=numbers, losses=[], return_outputs=False)
                else:
                    self._run_forward(running)
            return Ran(running.results, running.at_end, running.failure, running.buffers)
        finally:
            self._running = None

    def run_end(self, graph: StepGraph, values: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run the code between parts of a step on given outputs of the parts, and return the step's result.

        No part runs, and there is no communication.

        Args:
            graph: The graph of the step.
            values: The tensors that :meth:`values_at_end` describes, in the same order.
            step: The user's step with its arguments bound.
        """
        self.runs_last_stage = True
        plan = self._plan_of_end(graph)
        with self._replay.numbers_kept(graph), self._replay.stand_in_parameters(graph.params_between):
            given = [value.to(self._device) for value in values]
            return self._replay.run(plan, MicrobatchSeed(0, 0, 0), given, step)[0]

    @contextmanager
    def nothing_left(self, graph: StepGraph) -> Iterator[None]:
        """Undo at the end of this context what a step changes in attributes, and in buffers outside of parts.

        Args:
            graph: The graph of the step.
        """
        buffers = BuffersOfStep(self._root, graph.buffers_between)
        try:
            with unchanged(self._root, graph.changed):
                yield
        finally:
            buffers.restore()

    def values_at_end(self, graph: StepGraph) -> list[Leaf]:
        """Return the descriptions of those tensors returned by parts that the end of a step uses."""
        plan = self._plan_of_end(graph)
        return [plan.leaf(value) for value in plan.received]

    def _plan_of_end(self, graph: StepGraph) -> StagePlan:
        """Return a plan for the end of a step in which all parts are on an earlier stage."""
        return StagePlan(graph, [0] * len(graph.calls), 1, 2)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank the whole model in this context, so that it may call the model alone.

        A collective over ``pp``.
        """
        with whole_model(self._root, self.group, self._device), self._replay.switched_off():
            yield

    def timeline(self) -> Timeline | None:
        """Return when each action of the latest step with a backward ran. A collective over ``pp``.

        Returns:
            The timeline, or None if there was no such step, or an action of it was not recorded.
        """
        return self._recorder.timeline(self.order, self.group) if self.order else None

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with meta tensors in place of those that ranks of other stages write.

        These are the tensors of other stages and the buffers in :attr:`buffers_of_others`.

        Args:
            state: A state dict of the module.
        """
        return written_by_stage(state, self._mesh, self.buffers_of_others)

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add the meta tensors that the module has for other stages to a state dict that was read."""
        with self.all_stages.switched_off():
            for name, value in self._root.state_dict().items():
                if isinstance(value, Tensor) and is_remote(value):
                    state.setdefault(name, value)

    def collect_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the dictionaries of all stages. A collective over ``pp``."""
        of_stages: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(of_stages, parts, self.group)
        return [part for of_stage in of_stages for part in of_stage]

    def original(self) -> AbstractContextManager[None]:
        """Return a context in which the module is as it was before it was spread."""
        return self._original_module.again()

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state together with that of other stages. A collective over ``pp``."""
        return optimizer_state_of_all(state, self.group, self._mesh)

    def agree_on_buffers(self) -> None:
        """Copy the last stage's buffers outside of parts to all ranks of the pipeline. A collective over ``pp``.

        Code between parts may change these buffers, and only the last stage runs all of it.
        """
        broadcast_tensors(list(self._buffers_between().values()), self.group, self.last_rank)

    @property
    def buffers_of_others(self) -> frozenset[str]:
        """Return the names of the buffers of this rank whose values are up to date only on the rank of the last stage.

        The result is empty on that rank.
        """
        return frozenset() if self.is_last else frozenset(self._buffers_between())

    def _buffers_between(self) -> dict[str, Tensor]:
        """Return the buffers outside of parts, by name."""
        parts = tuple(f"{part}." for part in self.stages.parts)
        return {name: buffer for name, buffer in self._root.named_buffers() if not name.startswith(parts)}

    def _holders(self) -> dict[str, frozenset[int]]:
        """Return the ranks of the pipeline that have each parameter, and each buffer of a part, by name."""
        held = {name: self.stages.stages_of_param[name] for name, _ in self._root.named_parameters()}
        for part, stages in self.stages.stages_of_part.items():
            held |= {f"{part}.{name}": stages for name, _ in self._root.get_submodule(part).named_buffers()}
        return {name: frozenset(map(self.config.rank_of, stages)) for name, stages in held.items()}

    def total_norm(self, gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all stages, counting shared parameters once. A collective over ``pp``.

        Args:
            gradients: The gradients of this rank's parameters.
            order: The order of the norm: positive, and possibly infinite.
        """
        with self.all_stages.switched_off():
            return self._total_norm([gradient for gradient in gradients if not is_remote(gradient)], order)

    def _total_norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        params = {param.grad: name for name, param in self._root.named_parameters() if param.grad is not None}
        counted = [g for g in gradients if g not in params or self._is_first_with(params[g])]
        norm = get_total_norm(counted, order) if counted else torch.zeros((), device=self._device)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm.to(torch.float64 if norm.dtype == torch.float64 else torch.float32)
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, norm, group=self.group)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return total

    def _is_first_with(self, name: str) -> bool:
        return self.stages.stages_of_param[name][0] in self.own_stages

    def _prepare(self, graph: StepGraph, num_microbatches: int, has_backward: bool) -> PreparedStep:
        calls = self.stages.stages_of_calls(graph)
        self.stages.check_parameters(graph, calls)
        self.stages.check_hooks(graph, calls)
        num_stages = self.stages.num_stages
        plans = {stage: StagePlan(graph, calls, stage, num_stages) for stage in self.own_stages}
        if not has_backward:
            return PreparedStep(graph, plans, None)
        torch_stages = []
        for stage, plan in plans.items():
            torch_stage = TimedStage(
                _Submodule(partial(self._run_stage, stage), self._root),
                stage,
                num_stages,
                self._device,
                input_args=tuple(map(partial(_example, plan), plan.received)),
                # The output of the last stage is the loss, which is not sent.
                output_args=tuple(map(partial(_example, plan), plan.sent)) or torch.empty((), device="meta"),
                group=self._stage_to_stage,
                dw_builder=None if self._splits_backward else _nothing_is_left,
            )
            torch_stage.recorder = self._recorder
            torch_stage.run_backward = self._run_backward
            torch_stages.append(torch_stage)
        wanted = SCHEDULES[self.config.schedule]
        if not wanted.fits(num_microbatches, self.config.pp_size, num_stages):
            wanted = SCHEDULES[wanted.for_few]
        is_single = wanted.virtual_stages == 1
        schedule = wanted.torch_class(
            torch_stages[0] if is_single else torch_stages,
            num_microbatches,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )
        order = order_of(schedule, self.config.pp_size, num_microbatches)
        return PreparedStep(graph, plans, schedule, order)

    def _run_forward(self, running: _Running) -> None:
        """Run all microbatches through each stage of this rank, one stage after another.

        No schedule of torch is used, because all of them run backwards.
        """
        local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sending: list[tuple[dist.Work | None, Tensor]] = []
        for stage, plan in running.plans.items():
            before, after = (self.config.rank_of(s % self.stages.num_stages) for s in (stage - 1, stage + 1))
            # NCCL runs the messages of a group in order. Where the stages go round the ranks, ranks that all send at
            # once would all wait for the next rank to receive, so stages after the first send when they have ended.
            is_at_once = stage == 0 or len(running.plans) == 1
            waiting: list[Tensor] = []
            for microbatch in range(len(running.steps)):
                received = local.pop((stage, microbatch), None)
                if received is None:
                    leaves = [plan.leaf(value) for value in plan.received]
                    received = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in leaves)
                    for tensor in received:
                        dist.recv(tensor, group=self._stage_to_stage, group_src=before)
                sent = self._run_stage(stage, microbatch, received)
                if plan.is_last:
                    continue
                if stage + 1 in running.plans:
                    local[stage + 1, microbatch] = sent
                    continue
                waiting += map(Tensor.contiguous, sent)
                if is_at_once:
                    sending += [(self._send(tensor, after), tensor) for tensor in waiting]
                    waiting.clear()
            sending += [(self._send(tensor, after), tensor) for tensor in waiting]
        for work, _ in sending:
            if work is not None:
                work.wait()

    def _send(self, tensor: Tensor, to_rank: int) -> dist.Work | None:
        return dist.isend(tensor, group=self._stage_to_stage, group_dst=to_rank)

    def _run_stage(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        running = self._running
        assert running is not None
        seed = MicrobatchSeed(running.base, microbatch, self._data_parallel_rank)
        plan, step = running.plans[stage], running.steps[microbatch]
        self.runs_last_stage = plan.is_last

        def run() -> Any:
            if plan.graph.steady_buffers or plan.graph.buffers_between:
                stages_of = self.stages.stages_of_part
                running.buffers.restore(tuple(f"{part}." for part in self.stages.parts if stage not in stages_of[part]))
            # The attributes that the last microbatch sets on the last stage are kept as those of the step. If the graph
            # has of_whole_batch, they are replaced when the code between parts runs on the whole batch.
            is_left = plan.is_last and microbatch == len(running.steps) - 1
            changed = plan.graph.changed if plan.is_last else (*plan.graph.changed, *plan.graph.changed_inside)
            with unchanged(self._root, changed) if changed and not is_left else nullcontext():
                result, sent = self._replay.run(plan, seed, received, step)
            if not plan.is_last:
                return sent
            running.results[microbatch], running.at_end[microbatch] = result, sent
            return running.loss_of(result) if running.loss_of is not None else torch.zeros(1, device=self._device)

        if running.failure is None:
            try:
                return running.run_root(run)
            except BaseException as error:
                running.failure = Failure.now(error, f"stage {stage}, microbatch {microbatch}")
        if plan.is_last:
            return torch.zeros((), device=self._device)
        return tuple(
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in map(plan.leaf, plan.sent)
        )

    def _run_backward(self, stage: int, microbatch: int, backward: Callable[[], Any]) -> Any:
        """Run a stage's backward, and return its result; do not run it after an error, and return None.

        Args:
            stage: The index of the stage.
            microbatch: The index of the microbatch.
            backward: Function that runs the backward.
        """
        running = self._running
        assert running is not None
        if running.failure is None:
            try:
                return backward()
            except BaseException as error:
                # torch's stage raises a RuntimeError that describes the tensors, with the original error as its cause.
                raised = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
                running.failure = Failure.now(raised, f"backward of stage {stage}, microbatch {microbatch}")
        return None


def _example(plan: StagePlan, value: tuple[int, int]) -> Tensor:
    leaf = plan.leaf(value)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def _nothing_is_left() -> Callable[[], None]:
    """Return a function that computes no weight gradients, because the backward has already computed all gradients.

    torch's stage calls it to build the later part of a backward that is not split.
    """
    return lambda: None


class _Submodule(nn.Module):
    """Represent a stage to torch's schedules.

    Args:
        run: Function that runs the stage, given the index of the microbatch and the received tensors.
        root: The user's module.
    """

    def __init__(self, run: Callable[[int, tuple[Tensor, ...]], Any], root: nn.Module) -> None:
        super().__init__()
        self._run = run
        self._root = [root]  # In a list, the module is not registered as a child whose state would be saved.

    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        """Run the stage on the tensors that it has received for a microbatch.

        Args:
            received: The received tensors.
            microbatch: A tensor that holds the index of the microbatch.
        """
        return self._run(int(microbatch), received)

    def parameters(self, recurse: bool = True) -> Any:
        """Return this rank's parameters of the whole module, which schedules that defer weight gradients look for."""
        return (param for param in self._root[0].parameters() if not is_remote(param))
