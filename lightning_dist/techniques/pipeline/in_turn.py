"""Run steps with backwards of their own: the stages work in turn, each on the whole batch.

A step of manual optimization calls the model, a backward and an optimizer as often as it likes, and what it does next
may depend on what has happened so far. Each rank of the pipeline therefore runs the whole step on the whole batch:

- A part is called on the rank that has it, which broadcasts the tensors that the part returns.
- The code between parts runs on every rank, on the same values, and so takes the same path on every rank.
- In a backward, each rank computes the gradients of the tensors between parts. The rank that has a part computes the
  gradients of the part's parameters and arguments, and broadcasts those of the arguments.
- Optimizers step on the parameters of each rank's stages.

The stages do not overlap: while one works, the others wait. Autograd runs the nodes of a graph in the reverse of the
order in which they were made. That order is the same on all ranks, and with it that of the broadcasts of a backward.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lightning_dist import _compat
from lightning_dist.mesh.collectives import group_on_host
from lightning_dist.mesh.objects import broadcast_object
from lightning_dist.model.randomness import RngGenerators, digest_of_states
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.pipeline.failures import Failure, raise_together
from lightning_dist.techniques.pipeline.outside_of_steps import AllStages
from lightning_dist.techniques.pipeline.replay import Replay, part_seed
from lightning_dist.techniques.pipeline.shared import SharedParameters
from lightning_dist.tracing.step_graph import TraceError

__all__ = ["StagesInTurn", "refuse_gradients_of_parts"]


@dataclass(frozen=True)
class _Returned:
    """Describe a tensor that a part has returned.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        requires_grad: Whether the tensor requires a gradient.
        reaches_arguments: Whether the tensor's autograd graph leads to arguments of the part that require gradients.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    reaches_arguments: bool


class StagesInTurn:
    """Run the calls of parts in steps that every rank of the pipeline runs on the whole batch.

    Creating an instance is a collective over the pipeline.

    Args:
        root: The user's module with the parameters of this rank's stages.
        homes: For each part, by full name, the index along ``pp`` of the rank that runs it.
        replay: Object that is asked when a part is called.
        all_stages: Object by which code between parts works on the parameters of all stages.
        shared: Object that sums the gradients of parameters that several stages use.
        group: Process group of the pipeline's ranks, for collectives.
        data_parallel_rank: Index of this rank's part of the global batch; parts draw different numbers on each of them.
        device: Device of this rank's tensors.
    """

    def __init__(
        self,
        root: nn.Module,
        homes: Mapping[str, int],
        replay: Replay,
        all_stages: AllStages,
        shared: SharedParameters,
        group: dist.ProcessGroup,
        data_parallel_rank: int,
        device: torch.device,
    ) -> None:
        self._root = root
        self._homes = homes
        self._replay = replay
        self._all_stages = all_stages
        self._shared = shared
        self._group = group
        self.rank = dist.get_rank(group)
        """The index of this rank along ``pp``."""
        self._on_host = group_on_host(group, "calls of parts")
        self._data_parallel_rank = data_parallel_rank
        self._device = device
        self._generators = RngGenerators(device)
        self._is_inside = self._runs_backward = False
        self._raised: BaseException | None = None
        self._num_bytes_sent = 0

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run a step on the whole batch in this context, which all ranks of the pipeline enter.

        An error on any rank is raised on all ranks of the pipeline.

        Args:
            what: Name of the step, for errors.
        """
        self._all_stages.mark(self._root)
        before = self._replay.run_in_turn
        self._replay.run_in_turn = self._call
        try:
            with (
                self._failing_together(what),
                self._all_stages.hook_context(what),
                _CodeBetweenParts(self, self._root, self._all_stages),
            ):
                yield
        finally:
            self._replay.run_in_turn = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward in this context, which all ranks of the pipeline enter; a nested context has no effect."""
        if self._runs_backward:
            yield
            return
        self._runs_backward = True
        try:
            with (
                self._failing_together("a backward"),
                self._all_stages.switched_off(),
                self._shared.summing_gradients(),
            ):
                yield
        finally:
            self._runs_backward = False
            self._all_stages.mark(self._root)
            self._all_stages.forget_gradients()

    @contextmanager
    def _failing_together(self, what: str) -> Iterator[None]:
        """Raise an error on all ranks if one is raised in this context on any rank.

        Whatever a rank waits for when another one fails (the next call of a part, the next gradient, or the end of the
        context) begins with :meth:`_agree`, and so does the handling of the error.
        """
        try:
            yield
        except Exception as error:
            if error is not self._raised:
                self._agree(Failure.now(error, what))
            raise
        self._agree(None)

    def _agree(self, failure: Failure | None) -> None:
        """Raise an error on all ranks if any of them has failed. This is a collective over the pipeline."""
        try:
            raise_together(failure, self._on_host)
        except Exception as error:
            self._raised = error
            raise

    def take_bytes_sent(self) -> int:
        """Return the number of bytes that this rank has sent to other stages since the last call."""
        num_bytes, self._num_bytes_sent = self._num_bytes_sent, 0
        return num_bytes

    def _call(self, name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a part on the rank that has it, and return its output on every rank. This is a collective."""
        if self._is_inside:
            return _compat.call(part, *args, **kwargs)
        is_here = self._homes[name] == self.rank
        if _compat.is_in_backward():  # Activation checkpointing in the user's code recomputes the part.
            if is_here:
                return self._run(part, args, kwargs)[0]
            raise RuntimeError(
                f"Activation checkpointing recomputes {name} together with layers of another stage: with manual"
                " optimization under a pipeline, checkpoint each block by itself (activation_checkpointing=True)."
            )
        with self._all_stages.switched_off():
            args, kwargs = self._all_stages.broadcast_missing((args, kwargs))
            if is_here:
                return self._run_and_send(name, part, args, kwargs)
            return self._receive(name, part, args, kwargs)

    def _run_and_send(self, name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        failure: Failure | None = None
        leaves: list[Any] = []
        content = b""
        output: Any = None
        try:
            given, structure = _compat.tree_flatten((args, kwargs))
            places = _trained(given)
            entered = _Entrance.apply(self, *(given[place] for place in places)) if places else ()  # type: ignore[no-untyped-call]
            for place, tensor in zip(places, entered, strict=True):
                given[place] = tensor
            versions = _versions(given)
            args, kwargs = _compat.tree_unflatten(given, structure)
            output, draws = self._run(part, args, kwargs)
            self._all_stages.mark(part, name)
            if _versions(given) != versions:
                raise TraceError(
                    f"{name} changes an argument in place: with manual optimization under a pipeline the other stages"
                    " would not see that. Let it change a clone."
                )
            leaves = _compat.tree_leaves(output)
            entrance = next((tensor.grad_fn for tensor in entered), None)
            content = pickle.dumps((_compat.tree_map(lambda leaf: _described(leaf, entrance), output), draws))
        except Exception as error:
            failure = Failure.now(error, name)
        self._agree(failure)
        broadcast_object(content, self._on_host, self.rank)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._broadcast(leaf)
        if draws:
            _advance()
        return output

    def _run(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Run a part of this rank.

        The numbers that it draws depend on the state of the generators, which are restored afterwards, because the
        other ranks do not draw them.

        Returns:
            The output of the part, and whether it has drawn random numbers.
        """
        self._is_inside = True
        try:
            with self._generators.kept():
                self._generators.seed(part_seed(digest_of_states(), self._data_parallel_rank))
                seeded = digest_of_states()
                output = _compat.call(part, *args, **kwargs)
                return output, digest_of_states() != seeded
        finally:
            self._is_inside = False

    def _receive(self, name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._agree(None)
        home = self._homes[name]
        described, draws = pickle.loads(broadcast_object(b"", self._on_host, home))
        leaves, structure = _compat.tree_flatten(described)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, _Returned)]
        known = [leaves[place] for place in places]
        tensors: Sequence[Tensor] = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in known]
        for tensor in tensors:
            dist.broadcast(tensor, group=self._group, group_src=home)
        if any(one.requires_grad for one in known):
            given, _ = _compat.tree_flatten((args, kwargs))
            needed = [given[place] for place in _trained(given)]
            # Without arguments that require gradients, it is the anchor that makes the outputs require them.
            anchor = torch.zeros((), device=self._device, requires_grad=True)
            tensors = _Remote.apply(self, home, tensors, known, anchor, *needed)  # type: ignore[no-untyped-call]
        if draws:
            _advance()
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        output = _compat.tree_unflatten(leaves, structure)
        _compat.call_forward_hooks(part, args, kwargs, output)
        return output

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a part's arguments to all ranks. This is a collective, entered in a backward."""
        self._agree(None)
        for gradient in gradients:
            self._broadcast(gradient)

    def receive_gradients(self, home: int, arguments: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Return the gradients of a part's arguments. This is a collective, entered in a backward.

        Args:
            home: The index along ``pp`` of the rank that has the part.
            arguments: The shapes and dtypes of the arguments that require gradients.
        """
        self._agree(None)
        received = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in arguments]
        for tensor in received:
            dist.broadcast(tensor, group=self._group, group_src=home)
        return received

    def _broadcast(self, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        self._num_bytes_sent += tensor.numel() * tensor.element_size()
        dist.broadcast(tensor, group=self._group, group_src=self.rank)


class _Entrance(torch.autograd.Function):
    """Send the gradients of a part's arguments from the rank that has the part to all others."""

    @staticmethod
    def forward(ctx: Any, turn: StagesInTurn, *arguments: Tensor) -> tuple[Tensor, ...]:
        ctx.turn = turn
        return tuple(argument.view_as(argument) for argument in arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.turn.send_gradients(gradients)
        return None, *gradients


class _Remote(torch.autograd.Function):
    """Stand for a part of another rank in the autograd graph of this one."""

    @staticmethod
    def forward(
        ctx: Any,
        turn: StagesInTurn,
        home: int,
        received: Sequence[Tensor],
        known: Sequence[_Returned],
        anchor: Tensor,
        *arguments: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.turn, ctx.home, ctx.known = turn, home, known
        ctx.arguments = [(argument.shape, argument.dtype) for argument in arguments]
        ctx.set_materialize_grads(False)
        fixed = [tensor for tensor, one in zip(received, known, strict=True) if not one.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: Sequence[Tensor | None] = [None] * len(ctx.arguments)
        if any(g is not None and one.reaches_arguments for g, one in zip(gradients, ctx.known, strict=True)):
            found = ctx.turn.receive_gradients(ctx.home, ctx.arguments)
        return None, None, None, None, None, *found


class _CodeBetweenParts(TorchFunctionMode):
    """Run the backwards that code between parts calls itself, and let it compute losses from parameters.

    The rank that has a parameter computes with it, and so all of its gradient. The other ranks compute with a copy.

    Args:
        turn: Object that runs the step.
        root: The user's module.
        all_stages: Object that is switched on while code between parts runs.
    """

    def __init__(self, turn: StagesInTurn, root: nn.Module, all_stages: AllStages) -> None:
        super().__init__()
        self._turn = turn
        self._names = {id(param): name for name, param in root.named_parameters()}
        self._all_stages = all_stages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._all_stages.is_on:
            return func(*args, **kwargs)
        if _is_called_by_strategy():
            with self._all_stages.switched_off():
                return func(*args, **kwargs)
        if func in (Tensor.backward, torch.autograd.backward):
            with self._turn.backward():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            refuse_gradients_of_parts(self._names, *args, **kwargs)
            with self._turn.backward():
                return func(*args, **kwargs)
        if not torch.is_grad_enabled() or not _is_differentiable(func):
            return func(*args, **kwargs)
        leaves, structure = _compat.tree_flatten((args, kwargs))
        missing = {place: source for place, leaf in enumerate(leaves)
                   if (source := self._all_stages.source_of(leaf)) is not None}  # fmt: skip
        if not missing or not _trained(leaves):
            return func(*args, **kwargs)
        values = self._all_stages.broadcast_missing([leaves[place] for place in missing])
        for (place, source), value in zip(missing.items(), values, strict=True):
            if source != self._turn.rank:
                leaves[place] = value.detach().requires_grad_(leaves[place].requires_grad)
        args, kwargs = _compat.tree_unflatten(leaves, structure)
        with self._all_stages.switched_off():
            return func(*args, **kwargs)


def refuse_gradients_of_parts(
    names: Mapping[int, str], outputs: Any, inputs: Any, *args: Any, create_graph: bool = False, **kwargs: Any
) -> None:
    """Refuse calls of ``torch.autograd.grad`` by code between parts that need more than one stage has.

    Args:
        names: The names of the module's parameters, by id.
        outputs: The argument of ``torch.autograd.grad``.
        inputs: The argument of ``torch.autograd.grad``.
        args: Further arguments of ``torch.autograd.grad``.
        create_graph: The argument of ``torch.autograd.grad``.
        kwargs: Further arguments of ``torch.autograd.grad``.

    Raises:
        TraceError: If the call asks for the gradient of a parameter, or for a graph of the gradients.
    """
    name = next(
        (names[id(one)] for one in ([inputs] if isinstance(inputs, Tensor) else inputs) if id(one) in names), ""
    )
    if name:
        raise TraceError(
            f"The step calls torch.autograd.grad for the parameter {name!r}, which only the ranks of one stage have:"
            " under a pipeline, call self.manual_backward(loss), which leaves gradients in param.grad, or use a"
            " strategy without stages."
        )
    if create_graph or (len(args) > 2 and args[2]):
        raise TraceError(
            "The step calls torch.autograd.grad(create_graph=True), as penalties on gradients do: under a pipeline the"
            " gradients that another stage has computed have no graph. Use a strategy without stages, such as"
            " hybrid_shard or tensor_parallel."
        )


def _is_called_by_strategy() -> bool:
    """Return whether a function was called by code that gathers, frees and reduces tensors of this rank."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in _PASSES_ON:
        frame = frame.f_back
    name = str(frame.f_globals["__name__"])
    return name.startswith(_STRATEGY) and not name.startswith(_USER)


_PASSES_ON = frozenset(
    {
        "lightning_dist.techniques.shards_in_hooks", torch.functional.__name__, torch.overrides.__name__,
        Tensor.register_hook.__module__, torch.no_grad.__base__.__module__,
    }
)  # fmt: skip
"""Modules whose functions call a function for their callers."""

_STRATEGY, _USER = ("lightning_dist.", "torch.distributed."), "lightning_dist.plugins."

_TENSOR: Any = Tensor  # The attributes of the class are descriptors, which torch's type stubs do not declare.
_VIEWS = frozenset(getattr(_TENSOR, name).__get__ for name in ("H", "T", "imag", "mH", "mT", "real"))
"""Getters of attributes through which gradients flow."""

_NOT_DIFFERENTIABLE = frozenset(
    {
        "__get__", "__set__", "detach", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
        "retain_grad",
    }
)  # fmt: skip
"""Functions through whose results no gradients flow to their arguments."""


def _is_differentiable(func: Any) -> bool:
    return getattr(func, "__name__", "") not in _NOT_DIFFERENTIABLE or func in _VIEWS


def _trained(leaves: Sequence[Any]) -> list[int]:
    """Return the indices of the leaves that require gradients, if gradients are enabled."""
    if not torch.is_grad_enabled():
        return []
    return [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _versions(leaves: Sequence[Any]) -> list[int]:
    """Return the versions of the tensors in ``leaves`` that have one, which a change in place increases."""
    return [_compat.version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _described(leaf: Any, entrance: Any) -> Any:
    """Return what stands for a leaf of a part's output in the message to the other ranks."""
    if not isinstance(leaf, Tensor):
        return leaf
    if is_remote(leaf):
        raise TraceError("A part returns a tensor without values.")
    return _Returned(leaf.shape, leaf.dtype, leaf.requires_grad, _reaches(leaf.grad_fn, entrance))


def _reaches(node: Any, wanted: Any) -> bool:
    """Return whether the autograd graph leads from ``node`` to the node ``wanted``."""
    if wanted is None:
        return False
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node is wanted:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def _advance() -> None:
    """Draw a number on every rank, so that what is drawn next differs from what a part has drawn."""
    torch.randint(2**62, ())
