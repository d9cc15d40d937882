"""Run one stage of the user's unchanged module and step, by replaying the whole step without the other stages' parts.

Every rank of a pipeline has the whole batch. To run one of its stages on a microbatch, a rank runs the user's step:

- A part of an earlier stage does not run. It returns the tensors that the earlier stage has sent, and stand-ins of the
  right shape for its other tensors. The trace found the latter unused; using one raises an error (see
  :mod:`.stand_in`).
- A part of the stage itself runs.
- The step ends at the first call of a part of a later stage. The tensors that later stages use are sent.

The code between the parts runs on every stage. It draws the same random numbers on all stages, because the generators
are seeded for each microbatch. Each call of a part has a seed of its own, and restores the generators at its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist import _compat
from lightning_dist.model.randomness import RngGenerators
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.pipeline.stand_in import refuse_stand_ins, seeming_here, stand_in
from lightning_dist.tracing.step_graph import (
    InnerCall,
    Leaf,
    Output,
    StepGraph,
    TraceError,
    Value,
    checkpointing_without_reentry,
)

__all__ = ["MicrobatchSeed", "Replay", "StagePlan"]


@dataclass(frozen=True)
class StagePlan:
    """Describe which tensors a step receives and sends on one stage, and which calls of parts it runs there.

    Args:
        graph: Graph of the traced step that the plan is for.
        stages: For each call in ``graph.calls``, the index of its stage.
        stage: Index of the stage that the plan is for, from 0.
        num_stages: Number of stages of the pipeline, over all ranks.
    """

    graph: StepGraph
    stages: Sequence[int]
    stage: int
    num_stages: int

    @cached_property
    def received(self) -> list[Value]:
        """Return the values that this stage receives from the previous stage, in the order in which they are sent."""
        return self.graph.crossing(self.stages.__getitem__, self.stage) if self.stage else []

    @cached_property
    def sent(self) -> list[Value]:
        """Return the values that this stage sends to the next stage, in order.

        For the last stage, which sends nothing, these are the values that the end of the step uses when it is run again
        on the whole batch. There are none if it is not run again.
        """
        if self.is_last and self.graph.of_whole_batch is None:
            return []
        return self.graph.crossing(self.stages.__getitem__, self.stage + 1)

    @property
    def is_last(self) -> bool:
        """Return whether this stage is the last, on which the step runs to its end."""
        return self.stage == self.num_stages - 1

    def check_left(self) -> None:
        """Check that the step changes nothing in this stage's parts where the stage has ended.

        Raises:
            TraceError: If it does.
        """
        left = dict(self.graph.left_after_calls) if not self.is_last else {}
        for call, stage in zip(self.graph.calls, self.stages, strict=True) if left else ():
            if stage == self.stage and call.name in left:
                raise TraceError(
                    f"The step sets {left[call.name]} after it has called {call.name}, the part of the model that it"
                    " belongs to: a stage of a pipeline ends there, and would keep another value. Set it before the"
                    " call, in the forward of the part, or in a hook such as on_train_batch_end."
                )

    @cached_property
    def kept(self) -> list[list[int]]:
        """Return, for each call, the indices of those leaves of its output that are sent."""
        return [[place for index, place in self.sent if index == call] for call in range(len(self.stages))]

    def leaf(self, value: Value) -> Leaf:
        """Return the description of ``value``."""
        leaf = self.graph.calls[value[0]].leaves[value[1]]
        assert leaf is not None
        return leaf


class _EndOfStage(BaseException):
    """Signal that the step has reached a part of a later stage, where it ends on this stage."""


@dataclass(frozen=True)
class MicrobatchSeed:
    """Derive seeds, equal on all stages, for each microbatch, data-parallel rank and call of a part.

    Args:
        base: The seed of the step, drawn from generators that have the same state on all ranks of the pipeline.
        microbatch: Index of the microbatch in the step, from 0.
        data_parallel_rank: Index of this rank's part of the global batch.
    """

    base: int
    microbatch: int
    data_parallel_rank: int

    @property
    def seed_between_parts(self) -> int:
        """Return the seed of the code between parts."""
        state = self.base & _MASK
        for number in (self.microbatch, self.data_parallel_rank):
            state = _splitmix64(state + (number + 1) * _GOLDEN_GAMMA)
        return state >> 1

    def seed_of_call(self, call: int) -> int:
        """Return the seed of the part's call with the index ``call``."""
        return part_seed(self.seed_between_parts, call)


def part_seed(between: int, call: int) -> int:
    """Return the seed of a part's call.

    Args:
        between: Seed of the microbatch's code between parts (:attr:`MicrobatchSeed.seed_between_parts`).
        call: Index of the call among the calls of parts in the step.
    """
    return _splitmix64(between + (call + 1) * _GOLDEN_GAMMA) >> 1


_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _splitmix64(state: int) -> int:
    """Apply the output function of SplitMix64 (Steele et al., 2014)."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass
class _StageRunState:
    """Hold the state of a step that runs on one stage.

    Args:
        plan: Plan of the stage that runs.
        seed: Seeds of the microbatch that runs.
        given: The tensors that this stage has received, by their values in the graph.
        made: The tensors that parts of this stage have returned and that it sends, by their values in the graph.
        num_calls: The number of calls of parts so far, including those of parts of earlier stages.
        is_inside: Whether a part is running, so that a call of another part inside it is an ordinary call.
    """

    plan: StagePlan
    seed: MicrobatchSeed
    given: dict[Value, Tensor]
    made: dict[Value, Tensor] = field(default_factory=dict)
    num_calls: int = 0
    is_inside: bool = False


class Replay:
    """Run this rank's stages of ``root``. Creating an instance replaces the calls of the parts in place.

    Args:
        root: The user's module, in which the parameters of other ranks' stages are on the meta device.
        parts: All parts of the module, by full name, including those on other ranks.
        remote: Full names of the parts that are on other ranks only.
        device: The device of this rank's parameters.
    """

    def __init__(
        self, root: nn.Module, parts: Mapping[str, nn.Module], remote: frozenset[str], device: torch.device
    ) -> None:
        self._root = root
        self._modules = list(root.modules())
        self._device = device
        self._remote = remote
        self._run: _StageRunState | None = None
        self._has_whole_model = False
        self.run_in_turn: Callable[..., Any] | None = None
        """Function that runs a part on the rank that has it, given the part's name, the part and its arguments.

        It is called for each call of a part in a step that does not run stage by stage in microbatches, unless the part
        is called inside another one."""
        self._last_draws: dict[str, tuple[int, frozenset[str]]] = {}
        self._generators = RngGenerators(device)
        for name, part in parts.items():
            _compat.route_calls(part, partial(self._on_call, name, part))

    def run(
        self, plan: StagePlan, seed: MicrobatchSeed, received: Sequence[Tensor], step: Callable[[], Any]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Run ``step`` on one stage for one microbatch, without communication.

        Args:
            plan: Plan of the stage to run.
            seed: Seeds of the microbatch to run.
            received: The tensors for ``plan.received``, in the same order.
            step: Function without arguments that runs the user's step on the microbatch.

        Returns:
            The step's result (None on every stage but the last), and the tensors for ``plan.sent``.

        Raises:
            TraceError: If the step takes another path than the traced one.
        """
        plan.check_left()
        given = dict(zip(plan.received, received, strict=True))
        run = self._run = _StageRunState(plan, seed, given)
        result = None
        try:
            if plan.graph.draws:
                self._generators.seed(seed.seed_between_parts, plan.graph.draws)
            with checkpointing_without_reentry():
                result = step()
            refuse_stand_ins(result, "returns")
            for owner, key in plan.graph.changed:
                refuse_stand_ins(vars(self._root.get_submodule(owner)).get(key), f"keeps as {key}")
        except _EndOfStage:
            pass
        else:
            if not plan.is_last and run.num_calls < len(plan.graph.calls):
                raise TraceError(
                    f"The step ended after {run.num_calls} of the {len(plan.graph.calls)} calls of parts that it made"
                    " when it was traced: a pipeline cannot run a step that takes another path for some batches."
                )
        finally:
            self._run = None
        sent = []
        for value in plan.sent:
            tensor = run.made[value] if value in run.made else given[value]
            if plan.is_last:
                sent.append(tensor.detach())
                continue
            # torch's backward cannot begin at a leaf of the autograd graph, and a view cannot be detached in place from
            # the rest of its autograd graph: both are cloned.
            is_bare = tensor.requires_grad and (tensor.is_leaf or _compat.base_of(tensor) is not None)
            is_sendable = tensor.is_contiguous() and not is_bare
            sent.append(tensor if is_sendable else tensor.clone(memory_format=torch.contiguous_format))
        return result, tuple(sent)

    def restoring_generators(self, graph: StepGraph) -> AbstractContextManager[None]:
        """Return a context at whose end the generators that the step draws from get their former states back."""
        return self._generators.kept(graph.draws)

    @contextmanager
    def calls_allowed_outside_steps(self) -> Iterator[None]:
        """Let parts be called outside of a step in this context, in which this rank has all parts."""
        self._has_whole_model = True
        try:
            yield
        finally:
            self._has_whole_model = False

    @contextmanager
    def stand_in_parameters(self, names: Collection[str]) -> Iterator[None]:
        """Let code between parts run in this context although it uses parameters that are on other ranks.

        The parameters in ``names`` are replaced by stand-ins. All other parameters on the meta device report this
        rank's device as theirs, because a step may create tensors on ``next(self.parameters()).device``.

        Args:
            names: Full names of the parameters that the code between parts uses.
        """
        others = {
            param: stand_in(_like(param), self._device, f"the parameter {name}")
            for name, param in (self._root.named_parameters() if names else ())
            if name in names and is_remote(param)
        }
        places = [
            (_compat.own_parameters(module), key, param)
            for module in (self._root.modules() if others else ())
            for key, param in _compat.own_parameters(module).items()
            if param is not None and param in others
        ]
        for parameters, key, param in places:
            parameters[key] = others[param]  # type: ignore[assignment]  # A stand-in is no Parameter, and not trained.
        try:
            with seeming_here(self._modules, self._device):
                yield
        finally:
            for parameters, key, param in places:
                parameters[key] = param

    def _on_call(self, name: str, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None and self.run_in_turn is not None:
            return self.run_in_turn(name, part, args, kwargs)
        if run is None or run.is_inside:
            if name in self._remote and not self._has_whole_model:
                if run is not None:
                    raise RuntimeError(
                        f"The step calls {name} on its own, and again inside a module that is on another stage of the"
                        " pipeline. Call it in one of the two ways, or use a strategy without stages."
                    )
                raise RuntimeError(
                    f"{name} was called outside of a step, and its weights are on another stage of the pipeline. Call"
                    " the model inside `with lightning_dist.full_parameters(module):`, entered on every rank."
                )
            if run is None and name in self._last_draws and _compat.is_in_backward():
                # Activation checkpointing in the user's model recomputes a block in the backward, with the generators
                # in their state before the block's call; the block must be seeded as in the forward.
                call, draws = self._last_draws[name]
                with self._generators.kept(draws):
                    self._generators.seed(part_seed(torch.default_generator.initial_seed(), call), draws)
                    return _compat.call(part, *args, **kwargs)
            return _compat.call(part, *args, **kwargs)
        index, calls = run.num_calls, run.plan.graph.calls
        if index >= len(calls) or calls[index].name != name:
            expected = calls[index].name if index < len(calls) else "the end of the step"
            raise TraceError(
                f"The step calls {name} where {expected} was expected from its trace: a pipeline cannot run a step that"
                " takes another path for some batches."
            )
        run.num_calls += 1
        stage = run.plan.stages[index]
        if stage > run.plan.stage:
            raise _EndOfStage
        if stage < run.plan.stage:
            return self._stand_in(run, index, part, args, kwargs)
        refuse_stand_ins((args, kwargs), f"gives to {name}")
        run.is_inside = True
        try:
            if calls[index].inner or calls[index].draws:
                output = self._run_part(run, index, part, args, kwargs)
            else:
                output = _compat.call(part, *args, **kwargs)
        finally:
            run.is_inside = False
        if run.plan.kept[index]:
            for place, leaf in enumerate(_compat.tree_flatten(output)[0]):
                self._keep(run, (index, place), leaf)
        return output

    def _run_part(
        self, run: _StageRunState, index: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a part that draws random numbers, or that has inner modules from which hooks take tensors."""
        call = run.plan.graph.calls[index]
        with ExitStack() as around:
            if call.inner:
                around.enter_context(self._taken_from_inside(run, index))
            if call.draws:
                self._last_draws[call.name] = (index, call.draws)
                around.enter_context(self._generators.kept(call.draws))
                self._generators.seed(run.seed.seed_of_call(index), call.draws)
            return _compat.call(part, *args, **kwargs)

    def _keep(self, run: _StageRunState, value: Value, tensor: Any) -> None:
        """Keep ``tensor`` as ``value``, if the plan sends it.

        Raises:
            TraceError: If the shape differs from that in the trace.
        """
        if value[1] not in run.plan.kept[value[0]]:
            return
        known = run.plan.leaf(value)
        if run.plan.is_last and isinstance(tensor, Tensor):
            run.made[value] = tensor.detach().clone() if known.is_changed else tensor.detach()
            return
        if not isinstance(tensor, Tensor) or tensor.shape != known.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise TraceError(
                f"{run.plan.graph.calls[value[0]].name} returned {found} where it returned a tensor of shape"
                f" {tuple(known.shape)} when the step was traced: the tensors that a stage sends to the next must have"
                " the same shapes for each microbatch."
            )
        run.made[value] = (tensor.clone() if known.is_changed else tensor).to(known.dtype)

    @contextmanager
    def _taken_from_inside(self, run: _StageRunState, index: int) -> Iterator[None]:
        """Keep the tensors that hooks take from modules inside a part, while the part's call runs in this context."""
        num_calls: Counter[str] = Counter()

        def take(name: str, inner: list[InnerCall], module: nn.Module, args: Any, output: Any) -> None:
            leaves = _compat.tree_flatten(output)[0]
            for call in inner:
                for leaf, place in call.places.items() if call.occurrence == num_calls[name] else ():
                    self._keep(run, (index, place), leaves[leaf])
            num_calls[name] += 1

        by_name: dict[str, list[InnerCall]] = {}
        for call in run.plan.graph.calls[index].inner:
            by_name.setdefault(call.name, []).append(call)
        hooks = [
            self._root.get_submodule(name).register_forward_hook(partial(take, name, inner))
            for name, inner in by_name.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _stand_in(
        self, run: _StageRunState, index: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of a part of an earlier stage: the received tensors, and stand-ins for the others.

        The part's forward hooks are called, and those of the inner modules from which hooks take tensors.
        """
        call = run.plan.graph.calls[index]

        def given(output: Output, places: Mapping[int, int]) -> Any:
            leaves = []
            for at, (leaf, constant) in enumerate(zip(output.leaves, output.constants, strict=True)):
                tensor = run.given.get((index, places[at])) if at in places else None
                if leaf is None or tensor is None:
                    known = run.plan.leaf((index, places[at])) if leaf is not None and at in places else leaf
                    leaves.append(constant if known is None else stand_in(known, self._device, call.name))
                else:
                    is_changed = run.plan.leaf((index, places[at])).is_changed
                    leaves.append(tensor.clone() if is_changed else self._received_view(run, tensor))
            assert output.structure is not None
            return _compat.tree_unflatten(leaves, output.structure)

        for inner in call.inner:
            module = self._root.get_submodule(inner.name)
            _compat.call_forward_hooks(module, given(inner.args, {}), {}, given(inner.output, inner.places))
        result = given(call.output, {at: at for at in range(len(call.output.leaves))})
        _compat.call_forward_hooks(part, args, kwargs, result)
        return result

    def _received_view(self, run: _StageRunState, tensor: Tensor) -> Tensor:
        """Return a view of a received tensor for the code of this stage; the tensor itself if it needs no gradient.

        Hooks are registered on the view, because torch's schedules receive every step's tensors into the same buffers,
        on which hooks would accumulate. A gradient hook that code between parts registers takes effect on one stage
        only, the first that reaches that code, because the whole gradient passes through that stage.
        """
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)

        def register_hook(hook: Callable[[Tensor], Any]) -> Any:
            first = max(run.plan.stages[: run.num_calls])
            if run.is_inside or run.plan.stage == first:
                return Tensor.register_hook(view, hook)  # type: ignore[no-untyped-call]
            return RemovableHandle(OrderedDict())

        vars(view)["register_hook"] = register_hook
        return view


def _like(param: Tensor) -> Leaf:
    return Leaf(param.shape, param.dtype, requires_grad=False)
