"""Steps of a pipeline: microbatches through the stages of this rank, in the order of one of torch's schedules."""

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
from lightning_dist.pipeline.failures import Failure
from lightning_dist.pipeline.graph import Leaf, StepGraph
from lightning_dist.pipeline.of_batch import BuffersOfStep
from lightning_dist.pipeline.original_module import OriginalModule
from lightning_dist.pipeline.outside_of_steps import AllStages
from lightning_dist.pipeline.path import KnownPaths, Readable
from lightning_dist.pipeline.replay import MicrobatchSeed, Replay, StagePlan
from lightning_dist.pipeline.schedules import SCHEDULES
from lightning_dist.pipeline.shared import SharedParameters
from lightning_dist.pipeline.simulation import order_of
from lightning_dist.pipeline.stages import PipelineConfig, drop_remote, find_stages, own_units
from lightning_dist.pipeline.timeline import Order, Recorder, TimedStage, Timeline
from lightning_dist.pipeline.whole_model import whole_model
from lightning_dist.pipeline.whole_state import optimizer_state_of_all, written_by_stage
from lightning_dist.technique import Rows, Technique
from lightning_dist.units import Unit

__all__ = ["Pipeline", "PreparedStep", "Ran", "RunRoot"]

_MOST_PREPARED = 4
"""Schedules that are kept, each with buffers for what all its microbatches receive; of batches of other shapes."""

RunRoot = Callable[[Callable[[], Any]], Any]
"""Runs what it is given as a forward of the whole module."""


@dataclass(frozen=True)
class PreparedStep:
    """A step's graph, what of it each stage of this rank does, and the schedule that runs them."""

    graph: StepGraph
    plans: dict[int, StagePlan]
    schedule: Any
    """torch's; None for a step without backwards."""
    order: Order = ()


@dataclass(frozen=True)
class Ran:
    """What came of a step.

    Args:
        results: On the rank of the last stage, what the step returned on each microbatch; else nothing.
        at_end: There, the values of each microbatch that :meth:`Pipeline.values_at_end` describes, if the graph has
            ``of_whole_batch``.
        failure: The error of this rank.
        buffers: Those that the step changes, as they were before it.
    """

    results: list[Any]
    at_end: list[tuple[Tensor, ...]]
    failure: Failure | None
    buffers: BuffersOfStep


@dataclass
class _Running:
    """A step that runs.

    Args:
        plans: What each stage of this rank does of it.
        steps: The user's step on each microbatch.
        run_root: See :data:`RunRoot`.
        loss_of: From what the step returned, what its backward begins at; None: there is none.
        base: What its random numbers follow from.
        results: What the step returned on each microbatch, where the last stage is.
        buffers: Those that begin each microbatch with the values that they have before the step.
        at_end: Of each microbatch, what the end of the step on the whole batch begins with, where the last stage is.
        failure: The first error that was raised on this rank; from then on its stages compute nothing, and only take
            part in what the schedule sends.
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
        root: The user's module, whole, before anything is done to it.
        config: How the module is cut, and how the stages are run.
        units: The module's units.
        group: The process group of the ranks of one ``pp``, for collectives.
        stage_to_stage: A process group of the same ranks, for sends and receives.
        parameter_mesh: The mesh of the ranks that have the same stages.
        data_parallel_rank: The index of the part of the batch that this rank has.
        splits_backward: Whether a schedule may run the gradients of weights later than those of inputs. torch finds the
            weights among the leaves of the graph, and runs what lies between twice: it must know the first, and the
            second must not be a block that is run again.

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
        self.original_module = OriginalModule(root)
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
        """Besides modules, what a step's path may depend on."""
        self._paths: dict[object, KnownPaths] = {}
        self._prepared: dict[object, PreparedStep] = {}
        self._recorder = Recorder(device)
        self.order: Order = ()
        self._running: _Running | None = None

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Move what only other stages need to the meta device, and return the units that are left."""
        self._remote = drop_remote(self._root, self.stages, self.own_stages, units)
        return own_units(units, self._remote)

    def remote_tensors(self) -> Collection[Tensor]:
        """Return the parameters and buffers of other stages."""
        return self._remote.tensors

    def finish(self) -> None:
        """Let the parts of the module be replayed on this rank's stages."""
        modules = dict(self._root.named_modules())
        parts = {name: modules[name] for name in self.stages.parts}
        self._replay = Replay(self._root, parts, self._remote.parts, self._device)
        self.shared = SharedParameters(self._root, self.stages, self.config, self._stage_to_stage)
        self.all_stages = AllStages(self._root, self._holders(), self.group, self._device)
        self.original_module.is_spread()

    def after_microbatches(self, reduces: bool) -> None:
        """Sum the gradients of parameters that several stages share. A collective over ``pp``, if it reduces."""
        if reduces:
            self.shared.sum_gradients()

    def without_hook_views(self) -> AbstractContextManager[None]:
        """Return a context in which parameters of other stages are on the meta device, also in a hook."""
        return self.all_stages.switched_off()

    def table_rows(self) -> Rows:
        """Return rows that tell where the stages are, and how they are run."""
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
        """Return the number of the path that a step takes on this rank; -1 if it has not been followed on it.

        Args:
            key: What every step's path depends on.
            arguments: Of the step, after its batch; its path may depend on them.
        """
        return self._paths.setdefault(key, KnownPaths(self._root, self.readable)).taken(arguments)

    def follow(self, key: object, follow: Callable[[Sequence[Any]], StepGraph], arguments: Sequence[Any] = ()) -> int:
        """Follow a step, and return the number of a known path that is equal to its own; -1: there is none.

        Args:
            key: As of :meth:`known_path`, which comes first.
            follow: Follows the step on a microbatch, with arguments in the place of ``arguments``.
            arguments: As of :meth:`known_path`.
        """
        return self._paths[key].follow(arguments, follow)

    def prepare(
        self, key: object, path: int, is_followed: bool, num_microbatches: int, has_backward: bool
    ) -> PreparedStep:
        """Find out how a step runs on the stages; at once, where one that takes the same path has been prepared.

        Args:
            key: As of :meth:`known_path`.
            path: The number of its path, on which all ranks of the pipeline agree; -1: it is new.
            is_followed: Whether :meth:`follow` has just followed it.
            num_microbatches: How many there are.
            has_backward: Whether each is followed by a backward.
        """
        paths = self._paths[key]
        graph = paths.remember(path) if is_followed else paths.known(path)
        whole_key = (id(graph), num_microbatches, has_backward)
        prepared = self._prepared.pop(whole_key, None)
        if prepared is None or prepared.graph is not graph:
            prepared = self._prepare(graph, num_microbatches, has_backward)
        self._prepared[whole_key] = prepared  # the newest is last
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
        """Run a step's microbatches, and their backwards where there is a loss. A collective over ``pp``.

        An error of the user's code is not raised, but returned when the schedule has run to its end: the other ranks
        would wait for what this one sends. The caller raises it on all ranks.

        Args:
            prepared: The step, for as many microbatches.
            steps: The step on each microbatch, arguments bound.
            run_root: Runs what it is given as a forward of the whole module.
            loss_of: From what a microbatch's step returned, its part of the loss; None: no backward.

        Returns:
            What came of it.
        """
        base = int(torch.randint(2**62, ()))  # the same on all ranks of the pipeline, and after a resume
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
        """Run a step in which no part runs, and return what it returns: each gives one of ``values``. No communication.

        Args:
            graph: The step.
            values: What :meth:`values_at_end` describes, in its order.
            step: The step, its arguments bound.
        """
        plan = self._plan_of_end(graph)
        with self._replay.numbers_kept(graph), self._replay.stand_in_parameters(graph.params_between):
            given = [value.to(self._device) for value in values]
            return self._replay.run(plan, MicrobatchSeed(0, 0, 0), given, step)[0]

    @contextmanager
    def nothing_left(self, graph: StepGraph) -> Iterator[None]:
        """Undo what a step with the path ``graph`` leaves inside, in attributes and in buffers outside of parts."""
        buffers = BuffersOfStep(self._root, graph.buffers_between)
        try:
            with unchanged(self._root, graph.changed):
                yield
        finally:
            buffers.restore()

    def values_at_end(self, graph: StepGraph) -> list[Leaf]:
        """Return what is known of the values of parts that the end of a step makes something of."""
        plan = self._plan_of_end(graph)
        return [plan.leaf(value) for value in plan.received]

    def _plan_of_end(self, graph: StepGraph) -> StagePlan:
        """Return a plan by which all parts are on an earlier stage."""
        return StagePlan(graph, [0] * len(graph.calls), 1, 2)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every rank has the whole model, and may call it alone. A collective over ``pp``."""
        with whole_model(self._root, self.group, self._device), self._replay.switched_off():
            yield

    def timeline(self) -> Timeline | None:
        """When what ran in the latest step with a backward; None: there was none. A collective over ``pp``."""
        return self._recorder.timeline(self.order, self.group) if self.order else None

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with the tensors of other stages, and the buffers that are theirs, on the meta device."""
        return written_by_stage(state, self._mesh, self.buffers_of_others)

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add the weights of other stages to a state dict that was read, as the module has them."""
        with self.all_stages.switched_off():
            for name, value in self._root.state_dict().items():
                if isinstance(value, Tensor) and value.is_meta:
                    state.setdefault(name, value)

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with that of other stages. A collective over ``pp``."""
        return optimizer_state_of_all(state, self.group, self._mesh)

    def agree_on_buffers(self) -> None:
        """Give every stage the last one's buffers that are in no part, where the code between parts may change them."""
        broadcast_tensors(list(self._buffers_between().values()), self.group, self.last_rank)

    @property
    def buffers_of_others(self) -> frozenset[str]:
        """Names of the buffers that are here, but as they should be only where the last stage is."""
        return frozenset() if self.is_last else frozenset(self._buffers_between())

    def _buffers_between(self) -> dict[str, Tensor]:
        """Those in no part, by name."""
        parts = tuple(f"{part}." for part in self.stages.parts)
        return {name: buffer for name, buffer in self._root.named_buffers() if not name.startswith(parts)}

    def _holders(self) -> dict[str, frozenset[int]]:
        """Return the ranks of the pipeline that have each parameter, and each buffer of a part, by name."""
        held = {name: self.stages.stages_of_param[name] for name, _ in self._root.named_parameters()}
        for part, stages in self.stages.stages_of_part.items():
            held |= {f"{part}.{name}": stages for name, _ in self._root.get_submodule(part).named_buffers()}
        return {name: frozenset(map(self.config.rank_of, stages)) for name, stages in held.items()}

    def total_norm(self, gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """Return the norm of all stages' gradients, in which shared parameters count once. A collective over ``pp``.

        Args:
            gradients: The gradients of this rank's parameters.
            order: The order of the norm: positive, and possibly infinite.
        """
        with self.all_stages.switched_off():
            return self._total_norm([gradient for gradient in gradients if not gradient.is_meta], order)

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
                # The last one's is the loss, which goes nowhere.
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
        """Run each stage on all microbatches, one stage after another; torch's schedules all want backwards."""
        local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sending: list[tuple[dist.Work | None, Tensor]] = []
        for stage, plan in running.plans.items():
            before, after = (self.config.rank_of(s % self.stages.num_stages) for s in (stage - 1, stage + 1))
            # NCCL does one thing after the other: where stages go round, ranks that send at once all wait to receive.
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

        def run() -> Any:
            if plan.graph.steady_buffers or plan.graph.buffers_between:
                stages_of = self.stages.stages_of_part
                running.buffers.restore(tuple(f"{part}." for part in self.stages.parts if stage not in stages_of[part]))
            # The last microbatch's attributes are left where the whole batch has no graph that could leave its own.
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
        """Run a stage's backward, and return what torch's stage does; None if there is nothing to run after an error.

        Args:
            stage: The stage.
            microbatch: The number of the microbatch.
            backward: Runs the backward.
        """
        running = self._running
        assert running is not None
        if running.failure is None:
            try:
                return backward()
            except BaseException as error:
                # torch's stage wraps what was raised in an error that describes tensors.
                raised = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
                running.failure = Failure.now(raised, f"backward of stage {stage}, microbatch {microbatch}")
        return None


def _example(plan: StagePlan, value: tuple[int, int]) -> Tensor:
    leaf = plan.leaf(value)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def _nothing_is_left() -> Callable[[], None]:
    """Of a backward that has run whole where a schedule wanted the gradients of inputs alone."""
    return lambda: None


class _Submodule(nn.Module):
    """A stage as torch's schedules see it."""

    def __init__(self, run: Callable[[int, tuple[Tensor, ...]], Any], root: nn.Module) -> None:
        super().__init__()
        self._run = run
        self._whole = [root]  # not as a child, which it would have to be saved with

    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        """Run the microbatch of this number."""
        return self._run(int(microbatch), received)

    def parameters(self, recurse: bool = True) -> Any:
        """Those of the whole module: schedules that put off the weights' gradients ask for them."""
        return (param for param in self._whole[0].parameters() if not param.is_meta)
