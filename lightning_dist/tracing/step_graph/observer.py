"""Observe a step on fake tensors, and build the graph of the tensors that its parts pass to each other."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.flop_counter import FlopCounterMode

from lightning_dist._compat import GET_BASE, DispatchMode, base_of, tree_flatten, tree_leaves, version_of
from lightning_dist.tracing.step_graph.attribute_changes import AttributeChanges
from lightning_dist.tracing.step_graph.batch_marks import BatchMarks
from lightning_dist.tracing.step_graph.changes_after_parts import ChangesAfterParts
from lightning_dist.tracing.step_graph.draws import Draws
from lightning_dist.tracing.step_graph.errors import (
    EndOfTraceError,
    RepeatedCallsError,
    TraceError,
    next_item_refused,
)
from lightning_dist.tracing.step_graph.fake_run import Observer, tensors_in
from lightning_dist.tracing.step_graph.graph import InnerCall, Leaf, Output, PartCall, StepGraph, Value
from lightning_dist.tracing.step_graph.logged_values import LoggedValues
from lightning_dist.tracing.step_graph.marks import Marks, history_of, marks_of
from lightning_dist.tracing.step_graph.means import follow
from lightning_dist.tracing.step_graph.tensor_reads import READS, TEXTS
from lightning_dist.tracing.step_graph.watched_numbers import ask_for_value

__all__ = ["GraphObserver", "note_exchange"]

_FLOPS_PER_ELEMENT = 30
"""Cost of writing one element of a tensor, in floating-point operations of a matrix product that take the same time."""


def note_exchange(tensor: Tensor) -> None:
    """Record, while a step is traced, that the step combines ``tensor`` with tensors of other ranks by a collective.

    The values that the step logs are then not assumed to be means over samples, because the result of a collective
    (such as the largest loss of all ranks) often is not. Outside of a trace, this does nothing.

    Args:
        tensor: This rank's tensor in the collective.
    """
    if has_torch_function((tensor,)):
        handle_torch_function(note_exchange, (tensor,), tensor)


class GraphObserver:
    """Observe a step, and mark each tensor with the values and parameters from which it was computed.

    Args:
        root: The user's module.
        parts: The names of the parts.
        blocks: The parts that are repeated blocks, by name.
        is_first_pass_only: Whether to end the step when it calls a block for the second time.
    """

    def __init__(
        self,
        root: nn.Module,
        parts: frozenset[str],
        blocks: Mapping[str, nn.Module],
        is_first_pass_only: bool = False,
    ) -> None:
        self._is_first_pass_only = is_first_pass_only
        self._draws = Draws(self.is_between)
        self._attributes = AttributeChanges(root, parts)
        self._after_parts = ChangesAfterParts(root, parts)
        self._logged = LoggedValues()
        self._of_batch = BatchMarks()
        self.functions = _Functions(self, self._draws, self._of_batch)
        self._root = root
        self._parts = parts
        self._blocks = blocks
        self._calls: list[PartCall] = []
        self._end = PartCall("the end of the step")
        self._active: PartCall | None = None
        self._flops_before = 0
        self._inner_args: dict[str, Output] = {}
        self._inner_calls: Counter[str] = Counter()
        self._params_between: set[str] = set()
        self._params = {id(param): (name, param) for name, param in root.named_parameters()}
        """The real parameters with their names: a closure or a list that holds one uses it in place of a fake one."""
        self._hooked: list[tuple[frozenset[Value], int]] = []
        self._inputs: list[tuple[Tensor, int]] = []
        self._outputs: list[tuple[Value, Tensor, int]] = []
        self._input_history = 0
        self._changed_buffers: dict[str, bool] = {}
        self._loss_history: tuple[int, int] | None = None

    def is_between(self) -> bool:
        """Return whether code between parts is running."""
        return self._active is None

    def check_function(self, function: Any) -> None:
        """Refuse functions that a step of a pipeline cannot call between parts.

        Raises:
            TraceError: If ``function`` is one of them.
        """
        if function in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise TraceError(
                f"The step calls {'torch.autograd.' * (function is not Tensor.backward)}{function.__name__} itself, as"
                " penalties on gradients and adversarial perturbations do: under a pipeline the backward runs stage by"
                " stage after the step. Call it inside one block, or use a strategy without stages."
            )

    def count_calls(self) -> int:
        """Return how many calls of parts have ended."""
        return len(self._calls)

    @property
    def has_loss(self) -> bool:
        """Return whether the step has returned a tensor."""
        return self._loss_history is not None

    def check_same_loss(self, other: GraphObserver, by_number: bool) -> None:
        """Check that a decision by a tensor's value changes neither the parts that the step calls nor its loss.

        Args:
            other: The observer of a run of the step in which the decision has the other outcome.
            by_number: Whether the runs also differ in made-up numbers, which are then not compared.

        Raises:
            TraceError: If the decision changes one of them.
        """
        assert self._loss_history is not None
        assert other._loss_history is not None
        structure, whole = 0, 1
        place = structure if by_number else whole
        same_calls = [call.name for call in self._calls] == [call.name for call in other._calls]
        if not same_calls or self._loss_history[place] != other._loss_history[place]:
            raise TraceError(
                "The step decides by a value of a tensor (`if loss > ...`, `.item()` in a comparison)"
                f" {'how its loss is computed' if same_calls else 'which parts of the model it calls'}: a pipeline runs"
                " the step on microbatches, and the decision could differ between them. Decide for each sample with"
                " torch.where, or by a number that is no tensor, or use a strategy without stages."
            )

    def on_start(self) -> None:
        """Prepare for the step, after the model's tensors have been replaced by fake tensors."""
        for name, param in self._root.named_parameters():
            param.__dict__["_param_name"] = name
        self._attributes.begin()
        self._after_parts.begin()
        self._draws.watch(self._root)
        self._draws.were_drawn()
        self._of_batch.begin(self._root)

    def on_input(self, tensor: Tensor) -> None:
        """Mark a tensor of the batch, and watch whether the step changes it."""
        self._of_batch.mark(tensor)
        self._inputs.append((tensor, version_of(tensor)))

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to record the call of a part, or record the arguments of a module inside a part."""
        if self._active is not None:
            self._inner_args[name] = Output.of(args)
            return
        if name not in self._parts:
            return
        if self._is_first_pass_only and name in self._blocks and any(call.name == name for call in self._calls):
            raise EndOfTraceError
        self._attributes.before_part()
        self._after_parts.before_part()
        self._inner_args, self._inner_calls = {}, Counter()
        self._end.draws |= self._draws.were_drawn()
        self._active = PartCall(name)
        self._flops_before = self.functions.flops()
        given = list(tensors_in((args, kwargs)))
        for tensor in given:
            self._use(self._active, tensor)
        self._input_history = hash(tuple(map(history_of, given)))

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """End the record of a part's call, and record the tensors that it returns as values."""
        call = self._active
        if call is None:
            return
        if name != call.name:
            inner = InnerCall(name, self._inner_calls[name], self._inner_args[name], Output.of(out))
            self._inner_calls[name] += 1
            for place, leaf in enumerate(tree_flatten(out)[0]):
                if isinstance(leaf, Tensor):
                    leaf.__dict__["_made_by"] = (call, inner, place)
            return
        index = len(self._calls)
        call.output = Output.of(out)
        call.leaves += call.output.leaves
        for place, leaf in enumerate(tree_flatten(out)[0]):
            if isinstance(leaf, Tensor):
                leaf.__dict__.pop("_made_in", None)
                leaf.__dict__.pop("_made_by", None)
                leaf.__dict__["_marks"] = Marks(frozenset({(index, place)}))
                leaf.__dict__["_history"] = 2 * (hash((name, place, self._input_history)),)
                self._outputs.append(((index, place), leaf, version_of(leaf)))
        call.cost += self.functions.flops() - self._flops_before
        call.draws = self._draws.were_drawn()
        self._calls.append(call)
        self._active = None
        self._after_parts.on_return(name)

    def on_next(self, name: str) -> None:
        """Refuse that the step takes an item of an iterator.

        Raises:
            TraceError: In any case, since each stage would take an item for each microbatch.
        """
        raise TraceError(next_item_refused(name))

    def on_end(self, result: Any) -> None:
        """Record the result of the step, and the buffers and attributes that it has changed."""
        self._changed_buffers = self._of_batch.changed(self._root)
        self._end.draws |= self._draws.were_drawn()
        returned = list(tensors_in(result))
        first = next(iter(returned), None)
        loss = result.get("loss", first) if isinstance(result, Mapping) else first
        if isinstance(loss, Tensor):
            self._loss_history = history_of(loss)
        self._logged.on_result(result, loss if isinstance(loss, Tensor) else None)
        for tensor in (*returned, *self._attributes.end()):
            self._use(self._end, tensor)
        self._after_parts.end()

    def on_log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record the tensors or the number that ``self.log`` is called with, and whether they are reduced by a mean."""
        for tensor in tensors_in(value):
            self._use(self._end, tensor)
        self._logged.on_log(name, value, args, kwargs)

    def on_function(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the values and parameters that the result of a torch function depends on, and the cost of the call."""
        if function == GET_BASE:
            return  # The observer itself reads the bases of views.
        if function is note_exchange:
            if self._active is None:
                self._logged.on_exchange()
            return
        name = getattr(function, "__name__", "")
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
        if name in READS | TEXTS and self._active is None:
            for tensor in inputs:  # The step may return, log or keep the number.
                self._use(self._end, tensor)
                self._logged.on_read(name, tensor, is_text=name in TEXTS)
        if name == "register_hook" and self._active is None and not _is_called_by_torch():
            self._hooked += [(marks_of(tensor).values, len(self._calls)) for tensor in inputs]
        if not outputs and name != "__setitem__":
            return  # The function only reads metadata such as the shape.
        sizes = [tensor.numel() for tensor in outputs if not _is_view(tensor, inputs)]
        written = sum(size for size in sizes if isinstance(size, int))  # Sizes that depend on values are not known.
        if self._active is not None:
            self._active.cost += _FLOPS_PER_ELEMENT * written
            for tensor in inputs:
                self._use(self._active, tensor)
            for tensor in outputs:
                if all(tensor is not given for given in inputs):
                    tensor.__dict__["_made_in"] = self._active.name
            return
        self._end.cost += _FLOPS_PER_ELEMENT * written
        marks = Marks()
        for tensor in inputs:
            self._note_escape(tensor, function)
            marks |= self._marks_of(tensor)
        before = tuple(map(history_of, inputs))
        structure = hash((name, *(history[0] for history in before)))
        constants = [repr(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int | float | str)]
        history = (structure, hash((name, *constants, *(history[1] for history in before))))
        changed = inputs[:1] if name == "__setitem__" else [out for out in outputs if any(out is t for t in inputs)]
        bases = [base for tensor in changed if (base := base_of(tensor)) is not None]
        for tensor in [*outputs, *changed, *bases]:
            tensor.__dict__["_marks"] = marks | marks_of(tensor)
            tensor.__dict__["_history"] = history
        follow(name, args, kwargs, inputs, [*outputs, *changed])

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the full name of a parameter; None if ``tensor`` is none."""
        name: str | None = tensor.__dict__.get("_param_name")
        return self._params.get(id(tensor), (None, None))[0] if name is None else name

    def _marks_of(self, tensor: Tensor) -> Marks:
        name = self._name_of(tensor)
        if name is None:
            return marks_of(tensor)
        block = next((block for block in self._blocks if name.startswith(f"{block}.")), None)
        if block is not None:
            raise TraceError(
                f"The step uses the parameter {name!r} outside of {block}, the block that it belongs to. A stage has"
                " the parameters of its own blocks only. Put a penalty on weights into the optimizer (weight_decay),"
                " and what swaps or averages weights into hooks such as on_validation_start."
            )
        self._params_between.add(name)
        return Marks(params=frozenset({name}))

    def _use(self, call: PartCall, tensor: Tensor) -> None:
        name = self._name_of(tensor)
        if name is not None:
            call.params.add(name)
            return
        if call is self._end:
            self._note_escape(tensor, None)
        marks = marks_of(tensor)
        call.uses |= marks.values
        call.params |= marks.params

    def _note_escape(self, tensor: Tensor, function: Any) -> None:
        made_in = tensor.__dict__.get("_made_in")
        made_by = tensor.__dict__.get("_made_by")
        if made_in is not None and made_by is not None:
            self._take_from_part(tensor, *made_by)
        elif made_in is not None:
            where = f"given to {function.__name__}" if function is not None else "kept, logged or returned"
            raise TraceError(
                f"A tensor that is made inside {made_in} is {where} outside of it, and {made_in} does not return it:"
                " the tensor would be missing on a stage that does not run this part. Let the part return it."
            )

    def _take_from_part(self, tensor: Tensor, call: PartCall, inner: InnerCall, leaf: int) -> None:
        """Record a tensor that a hook takes from a module inside a part as a value, like those that the part returns.

        Args:
            tensor: The tensor that the hook takes.
            call: The call of the part.
            inner: The call of the module that returned the tensor.
            leaf: The index of the tensor among the leaves of that module's output.
        """
        index = next((index for index, known in enumerate(self._calls) if known is call), len(self._calls))
        if inner not in call.inner:
            call.inner.append(inner)
        if leaf not in inner.places:
            inner.places[leaf] = len(call.leaves)
            call.leaves.append(inner.output.leaves[leaf])
            self._outputs.append(((index, inner.places[leaf]), tensor, version_of(tensor)))
        del tensor.__dict__["_made_in"], tensor.__dict__["_made_by"]
        tensor.__dict__["_marks"] = Marks(frozenset({(index, inner.places[leaf])}))

    def graph(self, has_loss: bool = True) -> StepGraph:
        """Return the graph of the step that was observed.

        Args:
            has_loss: Whether the step must return a loss that depends on the model's output.

        Raises:
            TraceError: If the step cannot be split into stages.
        """
        for (index, place), tensor, version in self._outputs:
            if version_of(tensor) != version:
                leaf = self._calls[index].leaves[place]
                assert leaf is not None
                self._calls[index].leaves[place] = Leaf(leaf.shape, leaf.dtype, leaf.requires_grad, is_changed=True)
        names = [call.name for call in self._calls]
        for block in self._blocks:
            if names.count(block) > 1:
                raise RepeatedCallsError(
                    f"The step calls {block} {names.count(block)} times: a pipeline runs a model's blocks once a"
                    " microbatch. Concatenate the inputs of the calls into one batch, or use another strategy."
                )
        if has_loss and not self._calls:
            raise TraceError("The step calls none of the model's parts, so there is nothing to split into stages.")
        if has_loss and not self._end.uses:
            raise TraceError(
                "The loss that the step returns does not depend on what the model returns, so that nothing would be"
                " trained. Return the loss, computed from the model's output."
            )
        changes_batch = any(version_of(tensor) != version for tensor, version in self._inputs)
        params, prefixes = frozenset(self._params_between), tuple(f"{part}." for part in self._parts)
        inside = {name: by_batch for name, by_batch in self._changed_buffers.items() if name.startswith(prefixes)}
        # In a part that has both kinds, such as a queue and the position in it, one buffer may depend on the other.
        by_batch = {next(p for p in prefixes if name.startswith(p)) for name, by_batch in inside.items() if by_batch}
        steady = frozenset(name for name in inside if not name.startswith(tuple(by_batch)))
        return StepGraph(
            self._calls,
            self._end,
            changes_batch,
            params,
            tuple(self._attributes.changed),
            tuple(self._attributes.restored),
            tuple(self._attributes.changed_in_parts),
            steady,
            frozenset(inside) - steady,
            frozenset(self._changed_buffers.keys() - inside.keys()),
            self._logged.are_otherwise,
            tuple(self._logged.numbers),
            tuple(dict.fromkeys(self._hooked)),
            self._after_parts.undone,
            tuple(self._after_parts.left.items()),
            log_sizes=self._logged.sizes,
        )


class _Functions(TorchFunctionMode):
    def __init__(self, observer: GraphObserver, *operations: DispatchMode) -> None:
        super().__init__()
        self._observer = observer
        self._operations = operations
        self._counter = FlopCounterMode(display=False)
        self._entered = ExitStack()

    def __enter__(self) -> _Functions:
        self._observer.on_start()
        self._entered.enter_context(self._counter)
        for mode in self._operations:
            self._entered.enter_context(mode)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    def flops(self) -> int:
        return int(self._counter.get_total_flops())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._observer.is_between():
            self._observer.check_function(func)
        for leaf in tree_leaves((args, kwargs)):
            ask_for_value(leaf)  # A watched number may be used as a size.
        out = func(*args, **(kwargs or {}))
        self._observer.on_function(func, args, kwargs or {}, out)
        return out


def _is_called_by_torch() -> bool:
    """Return whether torch itself called the observed function, as FSDP2 does when it registers hooks on tensors."""
    frame = sys._getframe(1)
    between = (__name__, torch.overrides.__name__, Tensor.register_hook.__module__)
    while frame.f_back is not None and frame.f_globals["__name__"] in between:
        frame = frame.f_back
    return str(frame.f_globals["__name__"]).startswith("torch.")


def _is_view(tensor: Tensor, inputs: list[Tensor]) -> bool:
    base = base_of(tensor)
    return base is not None and any(base is given or base is base_of(given) for given in inputs)


_: type[Observer] = GraphObserver
