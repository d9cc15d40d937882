"""A stage from an untouched module and step: the whole step runs, and what is not the stage's own is stood in for.

Every rank of a pipeline has the whole batch. To run one of its stages on a microbatch, a rank runs the user's step:

- a part of an earlier stage is not run. It returns what it has returned there, as far as that was handed on, and else
  stand-ins of the right shape: what was found to be unused raises if it is not (see :mod:`.stand_in`);
- a part of the stage itself runs;
- at the first call of a part of a later stage the step ends. What later stages make something of is handed on.

The code between the parts runs on every stage, and draws the same random numbers on all: they are set for each
microbatch. A part draws numbers of its own, and leaves those of the step as they were.
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
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lightning_dist import _compat
from lightning_dist.pipeline.checkpointing import checkpointing_without_reentry
from lightning_dist.pipeline.graph import InnerCall, Leaf, Output, StepGraph, TraceError, Value
from lightning_dist.pipeline.stand_in import refuse_stand_ins, seeming_here, stand_in
from lightning_dist.randomness import RngGenerators

__all__ = ["MicrobatchSeed", "Replay", "StagePlan"]


@dataclass(frozen=True)
class StagePlan:
    """What a step does on one stage.

    Args:
        graph: The step.
        stages: The stage of each of its calls.
        stage: Which.
        num_stages: Of how many.
    """

    graph: StepGraph
    stages: Sequence[int]
    stage: int
    num_stages: int

    @cached_property
    def received(self) -> list[Value]:
        """What the stage before hands on, in order."""
        return self.graph.crossing(self.stages.__getitem__, self.stage) if self.stage else []

    @cached_property
    def sent(self) -> list[Value]:
        """What this stage hands on, in order; of the last, what the end of the step on the whole batch begins with."""
        if self.is_last and self.graph.of_whole_batch is None:
            return []
        return self.graph.crossing(self.stages.__getitem__, self.stage + 1)

    @property
    def is_last(self) -> bool:
        """Whether the step runs to its end here."""
        return self.stage == self.num_stages - 1

    @cached_property
    def kept(self) -> list[list[int]]:
        """Of each call, which of the leaves that it makes are sent."""
        return [[place for index, place in self.sent if index == call] for call in range(len(self.stages))]

    def leaf(self, value: Value) -> Leaf:
        """What is known of ``value``."""
        leaf = self.graph.calls[value[0]].leaves[value[1]]
        assert leaf is not None
        return leaf


class _EndOfStage(BaseException):
    """The step has come to a part of a later stage."""


@dataclass(frozen=True)
class MicrobatchSeed:
    """What random numbers follow from: the same on all stages, others for each microbatch, part and part of the data.

    Args:
        base: Of the step; drawn from the common numbers.
        microbatch: Its number.
        data_parallel_rank: Which part of the data.
    """

    base: int
    microbatch: int
    data_parallel_rank: int

    @property
    def between(self) -> int:
        """The seed of the code between parts."""
        state = self.base & _MASK
        for number in (self.microbatch, self.data_parallel_rank):
            state = _mixed(state + (number + 1) * _GOLDEN)
        return state >> 1

    def of(self, call: int) -> int:
        """The seed of a call of a part."""
        return part_seed(self.between, call)


def part_seed(between: int, call: int) -> int:
    """The seed of a call of a part, from that of the code around it."""
    return _mixed(between + (call + 1) * _GOLDEN) >> 1


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(state: int) -> int:
    """Steele et al., 2014: the output function of SplitMix64."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass
class _Run:
    plan: StagePlan
    seed: MicrobatchSeed
    given: dict[Value, Tensor]
    made: dict[Value, Tensor] = field(default_factory=dict)
    num_calls: int = 0
    is_inside: bool = False


class Replay:
    """Runs stages of ``root``, in place.

    Args:
        root: The user's module.
        parts: Its parts, by name.
        remote: Names of those that have no parameters here.
        device: Where it is.
    """

    def __init__(
        self, root: nn.Module, parts: Mapping[str, nn.Module], remote: frozenset[str], device: torch.device
    ) -> None:
        self._root = root
        self._device = device
        self._remote = remote
        self._run: _Run | None = None
        self._is_whole = False
        self._drawing: dict[str, tuple[int, frozenset[str]]] = {}
        self._numbers = RngGenerators(device)
        for name, part in parts.items():
            _compat.route_calls(part, partial(self._on_call, name, part))

    def run(
        self, plan: StagePlan, seed: MicrobatchSeed, received: Sequence[Tensor], step: Callable[[], Any]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Run one microbatch's ``step`` on one stage.

        Args:
            plan: Which stage.
            seed: Of the microbatch.
            received: The values of ``plan.received``.
            step: The user's step, its arguments bound.

        Returns:
            What the step returned (on the last stage; else None), and the values of ``plan.sent``.

        Raises:
            TraceError: If the step calls other parts than when it was followed.
        """
        given = dict(zip(plan.received, received, strict=True))
        run = self._run = _Run(plan, seed, given)
        result = None
        try:
            if plan.graph.draws:
                self._numbers.seed(seed.between, plan.graph.draws)
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
                    f"The step ended after {run.num_calls} of the {len(plan.graph.calls)} calls that it made when it"
                    " was followed: a pipeline cannot run a step that takes another path for some batches."
                )
        finally:
            self._run = None
        sent = []
        for value in plan.sent:
            tensor = run.made[value] if value in run.made else given[value]
            if plan.is_last:
                sent.append(tensor.detach())
                continue
            # A leaf has no backward of its own, and what is a view cannot be cut off from the rest of its graph.
            is_bare = tensor.requires_grad and (tensor.is_leaf or tensor._is_view())
            is_sendable = tensor.is_contiguous() and not is_bare
            sent.append(tensor if is_sendable else tensor.clone(memory_format=torch.contiguous_format))
        return result, tuple(sent)

    def numbers_kept(self, graph: StepGraph) -> AbstractContextManager[None]:
        """Around microbatches of a step: afterwards, random numbers go on as if none had been drawn."""
        return self._numbers.kept(graph.draws)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, all parts are here, and may be called outside of a step."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    @contextmanager
    def stand_in_parameters(self, names: Collection[str]) -> Iterator[None]:
        """Inside, parameters that are on other ranks let code between parts run.

        Those of ``names`` are full of NaN, and the others say that they are on this rank's device: a step may make
        tensors on ``next(self.parameters()).device``.
        """
        others = {
            param: stand_in(_like(param), self._device, f"the parameter {name}")
            for name, param in (self._root.named_parameters() if names else ())
            if name in names and param.is_meta
        }
        places = [
            (module._parameters, key, param)
            for module in (self._root.modules() if others else ())
            for key, param in module._parameters.items()
            if param is not None and param in others
        ]
        for parameters, key, param in places:
            parameters[key] = others[param]  # type: ignore[assignment]  # no parameter: nothing of it is ever trained
        try:
            with seeming_here(self._root, self._device):
                yield
        finally:
            for parameters, key, param in places:
                parameters[key] = param

    def _on_call(self, name: str, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None or run.is_inside:
            if name in self._remote and not self._is_whole:
                raise RuntimeError(
                    f"{name} was called outside of a step, and its weights are on another stage of the pipeline. Call"
                    " the model inside `with lightning_dist.full_parameters(module):`, entered on every rank."
                )
            if run is None and name in self._drawing and _compat.is_in_backward():
                # A model's own checkpointing runs its block again, with the numbers from before it was called.
                call, draws = self._drawing[name]
                with self._numbers.kept(draws):
                    self._numbers.seed(part_seed(torch.default_generator.initial_seed(), call), draws)
                    return _compat.call(part, *args, **kwargs)
            return _compat.call(part, *args, **kwargs)
        index, calls = run.num_calls, run.plan.graph.calls
        if index >= len(calls) or calls[index].name != name:
            expected = calls[index].name if index < len(calls) else "the end of the step"
            raise TraceError(
                f"The step calls {name} where it called {expected} when it was followed: a pipeline cannot run a step"
                " that takes another path for some batches."
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
            for place, leaf in enumerate(tree_flatten(output)[0]):
                self._keep(run, (index, place), leaf)
        return output

    def _run_part(self, run: _Run, index: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a part that draws random numbers, or from inside which hooks take something."""
        call = run.plan.graph.calls[index]
        with ExitStack() as around:
            if call.inner:
                around.enter_context(self._taken_from_inside(run, index))
            if call.draws:
                self._drawing[call.name] = (index, call.draws)
                around.enter_context(self._numbers.kept(call.draws))
                self._numbers.seed(run.seed.of(index), call.draws)
            return _compat.call(part, *args, **kwargs)

    def _keep(self, run: _Run, value: Value, tensor: Any) -> None:
        """Take ``tensor`` for ``value``, if the next stage is to have it."""
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
                f" {tuple(known.shape)} when the step was followed: what a stage hands on must have the same shape in"
                " each microbatch."
            )
        run.made[value] = (tensor.clone() if known.is_changed else tensor).to(known.dtype)

    @contextmanager
    def _taken_from_inside(self, run: _Run, index: int) -> Iterator[None]:
        """Around a call of a part: keep what modules inside it return, where hooks take it."""
        num_calls: Counter[str] = Counter()

        def take(name: str, inner: list[InnerCall], module: nn.Module, args: Any, output: Any) -> None:
            leaves = tree_flatten(output)[0]
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

    def _stand_in(self, run: _Run, index: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a part of another stage returns; its hooks, and those inside it that take something, are called."""
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
                    leaves.append(tensor.clone() if is_changed else self._handed_on(run, tensor))
            assert output.structure is not None
            return tree_unflatten(leaves, output.structure)

        for inner in call.inner:
            module = self._root.get_submodule(inner.name)
            _compat.call_forward_hooks(module, given(inner.args, {}), {}, given(inner.output, inner.places))
        result = given(call.output, {at: at for at in range(len(call.output.leaves))})
        _compat.call_forward_hooks(part, args, kwargs, result)
        return result

    def _handed_on(self, run: _Run, tensor: Tensor) -> Tensor:
        """Return what code of this stage is given for ``tensor``, which an earlier stage has made.

        Its hooks end with it: torch's schedules receive every step's tensors in the same ones. What a step between the
        parts asks of a gradient is done once, on the first stage that comes to it: there the whole gradient passes.
        """
        if not tensor.requires_grad:
            return tensor
        handed_on = tensor.view_as(tensor)

        def register_hook(hook: Callable[[Tensor], Any]) -> Any:
            first = max(run.plan.stages[: run.num_calls])
            if run.is_inside or run.plan.stage == first:
                return Tensor.register_hook(handed_on, hook)  # type: ignore[no-untyped-call]
            return RemovableHandle(OrderedDict())

        vars(handed_on)["register_hook"] = register_hook
        return handed_on


def _like(param: Tensor) -> Leaf:
    return Leaf(param.shape, param.dtype, requires_grad=False)
