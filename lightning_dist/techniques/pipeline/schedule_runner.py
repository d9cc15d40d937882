"""Pass microbatches through this rank's stages in the order of one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.mesh.timeline import Order, Recorder, TimedStage, Timeline
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.pipeline.attributes import restoring_attributes, restoring_undone
from lightning_dist.techniques.pipeline.buffers import BuffersOfStep
from lightning_dist.techniques.pipeline.failures import Failure
from lightning_dist.techniques.pipeline.replay import MicrobatchSeed, Replay, StagePlan
from lightning_dist.techniques.pipeline.schedules import SCHEDULES, order_of
from lightning_dist.techniques.pipeline.stages import PipelineConfig, Stages
from lightning_dist.tracing.step_graph import Leaf, StepGraph

__all__ = ["PreparedStep", "RunRoot", "ScheduleRunner", "StepOutcome"]

_MOST_PREPARED = 4
"""Maximum number of prepared steps, such as those for other shapes of batches, that are kept.

The schedule of each has receive buffers for all its microbatches.
"""

RunRoot = Callable[[Callable[[], Any]], Any]
"""Function that runs a given function as a forward of the whole module, and returns its result."""


@dataclass(frozen=True)
class PreparedStep:
    """Hold the graph of a step, the plan of each of this rank's stages, and the schedule that runs them.

    Args:
        graph: Graph of the traced step.
        plans: The plan of each stage of this rank, by the stage's index.
        schedule: torch's schedule, which runs this rank's stages; None for a step without backwards.
        order: The actions of each rank in the order of the schedule; empty for a step without backwards.
    """

    graph: StepGraph
    plans: dict[int, StagePlan]
    schedule: Any
    order: Order = ()


@dataclass(frozen=True)
class StepOutcome:
    """Hold the outcome of a step on this rank.

    Args:
        results: What the step returned on each microbatch; empty on ranks without the last stage.
        part_outputs: For each microbatch, the values that :meth:`ScheduleRunner.values_at_end` describes, or no values
            if the graph has no ``of_whole_batch``; empty on ranks without the last stage.
        failure: The first error on this rank, or None.
        buffers: Copies, made before the step, of the buffers that were restored at the start of each microbatch.
    """

    results: list[Any]
    part_outputs: list[tuple[Tensor, ...]]
    failure: Failure | None
    buffers: BuffersOfStep


@dataclass
class _StepState:
    """Hold the state of a step while it runs.

    Args:
        plans: The plan of each stage of this rank, by the stage's index.
        steps: The user's step on each microbatch, with its arguments bound.
        run_root: Function that runs a given function as a forward of the whole module.
        loss_of: Function that returns the tensor at which the backward begins, given the result of the step; None:
            there is no backward.
        base: The seed from which the seeds of all microbatches are derived.
        results: What the step returned on each microbatch; empty on ranks without the last stage.
        buffers: Copies, made before the step, of the buffers that are restored at the start of each microbatch.
        part_outputs: For each microbatch, the values from which the end of the step on the whole batch is computed;
            empty on ranks without the last stage.
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
    part_outputs: list[tuple[Tensor, ...]]
    failure: Failure | None = None


class ScheduleRunner:
    """Run steps on this rank's stages.

    Args:
        root: The user's module with the parameters of this rank's stages.
        config: Number of ranks and stages of the pipeline, and the name of its schedule.
        stages: Assignment of the module's parts and parameters to stages.
        group: Process group of the pipeline's ranks, for sends and receives.
        replay: Object that runs the user's step on one stage.
        data_parallel_rank: Index of this rank's part of the global batch, on which the seeds of microbatches depend.
        splits_backward: Whether a schedule may compute the gradients of weights later than those of inputs. For this,
            torch looks for the module's parameters among the leaves of the autograd graph, and runs the nodes between
            them and the inputs twice. The leaves must therefore be the module's parameters, and activation
            checkpointing must not recompute blocks.
        device: The device of this rank's tensors.
    """

    def __init__(
        self,
        root: nn.Module,
        config: PipelineConfig,
        stages: Stages,
        group: dist.ProcessGroup,
        replay: Replay,
        data_parallel_rank: int,
        splits_backward: bool,
        device: torch.device,
    ) -> None:
        self._root = root
        self._config = config
        self._stages = stages
        self._group = group
        self._replay = replay
        self._data_parallel_rank = data_parallel_rank
        self._splits_backward = splits_backward
        self._device = device
        self._own_stages = config.stages_on(dist.get_rank(group))
        self._prepared: dict[object, PreparedStep] = {}
        self._recorder = Recorder(device)
        self._running: _StepState | None = None
        self.order: Order = ()
        """The actions of each rank in the latest step with a backward, in their order."""
        self.runs_last_stage = False
        """Whether the stage that is running, or has run most recently, is the last stage of the pipeline."""

    def prepare(self, graph: StepGraph, num_microbatches: int, has_backward: bool) -> PreparedStep:
        """Plan how a step runs on the stages, or return the plan of an earlier step with the same graph.

        Args:
            graph: Graph of the traced step; an equal graph that is another object gets another plan.
            num_microbatches: Number of microbatches into which the batch of the step is split.
            has_backward: Whether a backward is run for each microbatch, as in training.
        """
        key = (id(graph), num_microbatches, has_backward)
        prepared = self._prepared.pop(key, None)
        if prepared is None or prepared.graph is not graph:
            prepared = self._prepare(graph, num_microbatches, has_backward)
        self._prepared[key] = prepared  # The dict is in the order of use, and its first entry is dropped.
        if len(self._prepared) > _MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    def _prepare(self, graph: StepGraph, num_microbatches: int, has_backward: bool) -> PreparedStep:
        calls = self._stages.stages_of_calls(graph)
        self._stages.check_parameters(graph, calls)
        self._stages.check_hooks(graph, calls)
        num_stages = self._stages.num_stages
        plans = {stage: StagePlan(graph, calls, stage, num_stages) for stage in self._own_stages}
        if not has_backward:
            return PreparedStep(graph, plans, None)
        torch_stages = []
        for stage, plan in plans.items():
            torch_stage = TimedStage(
                _StageModule(partial(self._run_stage, stage), self._root),
                stage,
                num_stages,
                self._device,
                input_args=tuple(map(partial(_example, plan), plan.received)),
                # The output of the last stage is the loss, which is not sent.
                output_args=tuple(map(partial(_example, plan), plan.sent)) or torch.empty((), device="meta"),
                group=self._group,
                dw_builder=None if self._splits_backward else _no_weight_backward,
            )
            torch_stage.recorder = self._recorder
            torch_stage.run_backward = self._run_backward
            torch_stages.append(torch_stage)
        wanted = SCHEDULES[self._config.schedule]
        if not wanted.fits(num_microbatches, self._config.pp_size, num_stages):
            wanted = SCHEDULES[wanted.fallback]
        is_single = wanted.virtual_stages == 1
        schedule = wanted.torch_class(
            torch_stages[0] if is_single else torch_stages,
            num_microbatches,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )
        order = order_of(schedule, self._config.pp_size, num_microbatches)
        return PreparedStep(graph, plans, schedule, order)

    def run(
        self,
        prepared: PreparedStep,
        steps: Sequence[Callable[[], Any]],
        run_root: RunRoot,
        loss_of: Callable[[Any], Tensor] | None = None,
    ) -> StepOutcome:
        """Run the microbatches of a step, and their backwards if there is a loss. This is a collective over ``pp``.

        An error of the user's code is not raised, because the other ranks would wait for what this rank sends. The
        schedule runs to its end, the error is returned, and the caller raises it on all ranks.

        Args:
            prepared: The prepared step, for the same number of microbatches.
            steps: For each microbatch, a function without arguments that runs the user's step on it.
            run_root: Function that runs a given function as a forward of the whole module.
            loss_of: Function that returns a microbatch's part of the loss, given the result of the step on it; None:
                there is no backward.

        Returns:
            The outcome of the step on this rank.
        """
        # The generator has the same state on all ranks of the pipeline, and after a resume. A step that draws no
        # numbers leaves it as it is, so that hooks draw the numbers of one process.
        base = int(torch.randint(2**62, ())) if prepared.graph.draws else 0
        has_last = any(plan.is_last for plan in prepared.plans.values())
        results = [None] * len(steps) if has_last else []
        buffers = BuffersOfStep(self._root, prepared.graph.batch_independent_buffers | prepared.graph.buffers_between)
        part_outputs: list[tuple[Tensor, ...]] = [()] * len(results)
        running = self._running = _StepState(
            prepared.plans, steps, run_root, loss_of, base, results, buffers, part_outputs
        )
        if loss_of is not None:
            self.order = prepared.order
            self._recorder.begin()
        numbers = torch.arange(len(steps))
        try:
            with (
                self._replay.restoring_generators(prepared.graph),
                self._replay.stand_in_parameters(prepared.graph.params_between),
            ):
                if loss_of is not None:
                    prepared.schedule.step(microbatch=numbers, target=numbers, losses=[], return_outputs=False)
                else:
                    self._run_forward(running)
            return StepOutcome(running.results, running.part_outputs, running.failure, running.buffers)
        finally:
            self._running = None

    def _run_forward(self, running: _StepState) -> None:
        """Run all microbatches through each stage of this rank, one stage after another.

        No schedule of torch is used, because all of them run backwards.
        """
        local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sending: list[tuple[dist.Work | None, Tensor]] = []
        for stage, plan in running.plans.items():
            before, after = (self._config.rank_of(s % self._stages.num_stages) for s in (stage - 1, stage + 1))
            # NCCL runs the messages of a group in order. If stages are placed round-robin and all ranks sent at once,
            # each would wait for the next rank to receive. Stages after the first therefore send when they have ended.
            is_at_once = stage == 0 or len(running.plans) == 1
            waiting: list[Tensor] = []
            for microbatch in range(len(running.steps)):
                received = local.pop((stage, microbatch), None)
                if received is None:
                    leaves = [plan.leaf(value) for value in plan.received]
                    received = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in leaves)
                    for tensor in received:
                        dist.recv(tensor, group=self._group, group_src=before)
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
        return dist.isend(tensor, group=self._group, group_dst=to_rank)

    def _run_stage(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        running = self._running
        assert running is not None
        seed = MicrobatchSeed(running.base, microbatch, self._data_parallel_rank)
        plan, step = running.plans[stage], running.steps[microbatch]
        self.runs_last_stage = plan.is_last

        def run() -> Any:
            if plan.graph.batch_independent_buffers or plan.graph.buffers_between:
                stages_of = self._stages.stages_of_part
                running.buffers.restore(
                    tuple(f"{part}." for part in self._stages.parts if stage not in stages_of[part])
                )
            # The attributes that the last microbatch sets on the last stage are kept as those of the step. If the graph
            # has of_whole_batch, they are replaced when the code between parts runs on the whole batch. The attributes
            # of modules inside parts are kept on the stages that have the parts.
            is_last = microbatch == len(running.steps) - 1
            changed = plan.graph.changed if not (plan.is_last and is_last) else ()
            changed += plan.graph.restored_attributes if not plan.is_last else ()
            changed += plan.graph.changed_in_parts if not is_last else ()
            undone = plan.graph.undone if not plan.is_last and any(plan.graph.undone) else None
            with (
                restoring_attributes(self._root, changed) if changed else nullcontext(),
                restoring_undone(self._root, undone) if undone else nullcontext(),
            ):
                result, sent = self._replay.run(plan, seed, received, step)
            if not plan.is_last:
                return sent
            running.results[microbatch], running.part_outputs[microbatch] = result, sent
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
            stage: Index of the stage in the pipeline.
            microbatch: Index of the microbatch in the step.
            backward: Function without arguments that runs autograd for this stage and microbatch.
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

    def run_between_parts(self, graph: StepGraph, values: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run the code between parts of a step on given outputs of the parts, and return the step's result.

        No part runs, and there is no communication.

        Args:
            graph: Graph of the step, which says which outputs of parts the code between parts uses.
            values: The tensors that :meth:`values_at_end` describes, in the same order.
            step: Function without arguments that runs the user's step.
        """
        self.runs_last_stage = True
        plan = self._plan_of_end(graph)
        with self._replay.restoring_generators(graph), self._replay.stand_in_parameters(graph.params_between):
            given = [value.to(self._device) for value in values]
            return self._replay.run(plan, MicrobatchSeed(0, 0, 0), given, step)[0]

    @contextmanager
    def restoring_side_effects(self, graph: StepGraph) -> Iterator[None]:
        """Restore at the end of this context the attributes, and the buffers outside of parts, that a step changes.

        Args:
            graph: Graph of the step, which names these attributes and buffers.
        """
        buffers = BuffersOfStep(self._root, graph.buffers_between)
        try:
            with restoring_attributes(self._root, graph.changed):
                yield
        finally:
            buffers.restore()

    def values_at_end(self, graph: StepGraph) -> list[Leaf]:
        """Return the descriptions of the tensors that the end of a step uses among those that parts return."""
        plan = self._plan_of_end(graph)
        return [plan.leaf(value) for value in plan.received]

    def _plan_of_end(self, graph: StepGraph) -> StagePlan:
        """Return a plan for the end of a step in which all parts are on an earlier stage."""
        return StagePlan(graph, [0] * len(graph.calls), 1, 2)

    def take_bytes_sent(self) -> int:
        """Return the number of bytes that this rank has sent to other stages since the last call, in training steps."""
        num_bytes, self._recorder.num_bytes_sent = self._recorder.num_bytes_sent, 0
        return num_bytes

    def timeline(self, group: dist.ProcessGroup) -> Timeline | None:
        """Return when each action of the latest step with a backward ran. This is a collective over ``pp``.

        Args:
            group: Process group of the pipeline's ranks, for collectives.

        Returns:
            The timeline, or None if there was no such step, or an action of it was not recorded.
        """
        return self._recorder.timeline(self.order, group) if self.order else None


def _example(plan: StagePlan, value: tuple[int, int]) -> Tensor:
    leaf = plan.leaf(value)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def _no_weight_backward() -> Callable[[], None]:
    """Return a function that computes no weight gradients, because the backward has already computed all gradients.

    torch's stage calls it to build the later part of a backward that is not split.
    """
    return lambda: None


class _StageModule(nn.Module):
    """Wrap a stage as the module that torch's schedules call.

    Args:
        run: Function that runs the stage, given the index of the microbatch and the received tensors.
        root: The user's module, whose parameters :meth:`parameters` returns.
    """

    def __init__(self, run: Callable[[int, tuple[Tensor, ...]], Any], root: nn.Module) -> None:
        super().__init__()
        self._run = run
        self._root = [root]  # In a list, the module is not registered as a child whose state would be saved.

    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        """Run the stage on the tensors that it has received for a microbatch.

        Args:
            received: The tensors that the previous stage has sent for this microbatch; none on the first stage.
            microbatch: Tensor of one element, the index of the microbatch.
        """
        return self._run(int(microbatch), received)

    def parameters(self, recurse: bool = True) -> Any:
        """Return this rank's parameters of the whole module, which schedules that defer weight gradients look for."""
        return (param for param in self._root[0].parameters() if not is_remote(param))
