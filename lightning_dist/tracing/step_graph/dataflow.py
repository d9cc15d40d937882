"""Record the data flow between the layers of a model, in one step on fake tensors.

A tensor's *sources* are the layers (linear, convolution, embedding) that it was computed from with no other layer in
between. Its *ancestors* are all layers that it was computed from. A *residual* sum adds to a tensor what layers have
computed from that tensor: the sources of the first summand are among the ancestors of the second.

A *free* parameter is one that a module with submodules uses in its own code, such as a bias that is added to the
queries. Free parameters are sources as well, under their full names, and so is the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_dist._compat import DispatchMode, has_foreign_hooks
from lightning_dist.model.layers import linear_layer
from lightning_dist.tracing.step_graph.draws import draws_numbers
from lightning_dist.tracing.step_graph.fake_run import FailureReason, run_on_fakes, tensors_in

__all__ = ["BATCH", "Call", "Dataflow", "is_learned", "is_stream", "is_used_outside", "sources"]

BATCH = frozenset({"<the batch>"})
"""The sources of the tensors of the batch."""

_NONE: frozenset[str] = frozenset()
_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


@dataclass(frozen=True)
class Call:
    """Represent one recorded call of a module.

    Args:
        name: Full name of the module.
        args: Positional arguments of the call, with fake tensors.
        kwargs: Keyword arguments of the call, with fake tensors.
        output: Result of the call, with fake tensors.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass
class Dataflow:
    """Record the data flow between layers, as the observer of a step on fake tensors.

    Args:
        blocks: Full names of the model's blocks.
        root: The model. Parameters are recorded by their full names, tied ones by the first of their names.
        works_on_parts: Function that returns whether a torch function can work on each rank's part of a tensor whose
            features are split over ranks. Its arguments are the torch function, the tensor, and the arguments.
    """

    blocks: frozenset[str]
    root: nn.Module
    works_on_parts: Callable[[Any, Tensor, tuple[Any, ...], Mapping[str, Any]], bool]
    calls: list[Call] = field(default_factory=list)
    """The calls of all modules, in the order in which they returned."""
    called: set[str] = field(default_factory=set)
    """Names of the layers (modules with a parameter of two or more dimensions) that have run."""
    input_sources: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The sources of the inputs of each module that holds parameters, by the module's name."""
    residual: set[str] = field(default_factory=set)
    """Names of the layers whose output is the second summand of a residual sum."""
    draws_random: bool = False
    """Whether the step may draw random numbers from torch's generators."""
    leaked_layers: set[str] = field(default_factory=set)
    """Names of the layers whose results leave a block by another way than its output, such as a hook, and are used."""
    leaks: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The functions that use values computed in a module which it does not return, by the module's name."""
    draws_per_sample: set[str] = field(default_factory=set)
    """Names of the blocks that drew random numbers with one value for several tokens, as stochastic depth does."""
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The functions called on a layer's output that need all of its features on each rank, by the layer's name."""
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The modules whose own code passes a parameter to a function, by its name; the model itself is ``""``."""
    hooked: set[str] = field(default_factory=set)
    """Names of the modules that had a hook of the user when they were called."""
    used_later: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The indices of the tensors returned by a module that are passed to a function later, by the module's name."""

    def __post_init__(self) -> None:
        self.functions = _Functions(self)
        self.running: list[str] = []
        """Names of the modules that are running now, the outermost first."""
        self._parameters: dict[int, str] = {}  # It is keyed by the id of a parameter's fake.

    def first_calls(self) -> dict[str, Call]:
        """Return the first call of each module by its name."""
        return {call.name: call for call in reversed(self.calls)}

    def runs_again(self, name: str) -> bool:
        """Return whether the module ``name`` was called more than once."""
        return sum(call.name == name for call in self.calls) > 1

    def uses_of_leaks(self, name: str) -> str:
        """Return functions that use values computed in a module which it does not return; empty: there are none."""
        return ", ".join(sorted(self.leaks.get(name, ()))[:3])

    def on_input(self, tensor: Tensor) -> None:
        """Mark a tensor of the batch with :data:`BATCH` as its source."""
        _mark(tensor, BATCH, BATCH)

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the sources of a module's inputs."""
        self.running.append(name)
        if has_foreign_hooks(module):
            self.hooked.add(name)
        if any(True for _ in module.parameters(recurse=False)):
            for tensor in tensors_in((args, kwargs)):
                self.input_sources[name] |= sources(tensor)

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a module's call, and mark a layer as the only source of the tensors that it returns."""
        while self.running and self.running.pop() != name:  # Modules that raised are on the stack, but never return.
            pass
        self.calls.append(Call(name, args, kwargs, out))
        if name in self.blocks:
            for tensor in tensors_in(out):
                tensor.__dict__.pop("_is_of_block", None)
        for index, tensor in enumerate(tensors_in(out)):
            tensor.__dict__.setdefault("_returned_by", []).append((name, index))
        if any(param.ndim > 1 for param in module.parameters(recurse=False)):
            self.called.add(name)
            ancestors = BATCH.union(*(_ancestors(tensor) for tensor in tensors_in((args, kwargs))), {name})
            for tensor in tensors_in(out):
                _mark(tensor, frozenset({name}), ancestors)
                tensor.__dict__["_features_of"] = name

    def on_next(self, name: str) -> None:
        """Do nothing, because the real step gets the same item."""

    def on_end(self, result: Any) -> None:
        """Do nothing, because the record is complete already."""

    def _returns_features_in(self, name: str, tensor: Tensor) -> bool:
        """Return whether a dimension of ``tensor`` can hold a layer's output features; attention scores have none."""
        layer = linear_layer(self.root.get_submodule(name)) if name in self.called else None
        sizes = [size for size in tensor.shape if isinstance(size, int)]  # Symbolic sizes depend on values.
        return layer is None or layer.out_features in sizes or len(sizes) < tensor.ndim

    def _note_reader(self, param: nn.Parameter) -> None:
        """Record which module uses a parameter, and mark the parameter as a source if it is a free one."""
        if not self._parameters:
            self._parameters = {id(param): name for name, param in self.root.named_parameters()}
        name = self._parameters.get(id(param))
        if name is None:
            return
        reader = self.running[-1] if self.running else ""
        self.readers[name].add(reader)
        if any(True for _ in self.root.get_submodule(reader).children()):
            _mark(param, frozenset({name}), frozenset({name}))

    def on_log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record that the step logs ``value``."""
        for tensor in tensors_in(value):
            self._note_leaks(tensor, f"self.log({name!r})")

    def _note_leaks(self, tensor: Tensor, function: str) -> None:
        """Record from which modules ``tensor`` has come by another way than their output, such as an attribute."""
        made_in = tensor.__dict__.get("_made_in", ())
        if not made_in or not _ancestors(tensor) & (BATCH | self.called):
            return
        returned_by = {module for module, _ in tensor.__dict__.get("_returned_by", ())}
        for module in made_in:
            if module not in self.running and module not in returned_by:
                self.leaks[module].add(function)

    def on_draw(self, drawn: Any, is_known: bool) -> None:
        """Record that an operation has drawn random numbers.

        Args:
            drawn: The result of the operation. Its first tensor has the shape of the numbers.
            is_known: Whether the operation is torch's own. Others may draw no numbers, and return anything.
        """
        self.draws_random = True
        first = next(iter(tensors_in(drawn)), None) if is_known else None
        if first is not None and _holds_for_several_tokens(first):
            self.draws_per_sample |= self.blocks.intersection(self.running)

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record a call of a torch function, and mark its results with the sources of all of its inputs."""
        name = getattr(function, "__name__", "")
        # After the trace, the mode or the probability of a dropout may change, and with it whether it draws numbers.
        self.draws_random |= "dropout" in name or name == "scaled_dot_product_attention"
        inputs = list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(out))
        for tensor in inputs if outputs else ():  # A function that returns no tensor only asks for a shape or a dtype.
            if isinstance(tensor, nn.Parameter):
                self._note_reader(tensor)
            for module, index in tensor.__dict__.get("_returned_by", ()):
                if module not in self.running:
                    self.used_later[module].add(index)
            self._note_leaks(tensor, name.strip("_"))
        if function in _SUMS and len(inputs) == 2:
            for stream, added in (inputs, reversed(inputs)):
                of_stream, of_added = sources(stream) - BATCH, sources(added) - BATCH
                # Attention scores can be sums too, but their terms have the queries or the keys as a common source.
                is_residual = of_stream and of_stream <= _ancestors(added) and of_stream.isdisjoint(of_added)
                if is_residual and not of_added <= _ancestors(stream):
                    self.residual |= {name for name in of_added if self._returns_features_in(name, added)}
        if name == "__setitem__":
            outputs = inputs[:1]
        for tensor in inputs if outputs else ():
            layer = tensor.__dict__.get("_features_of")
            if layer is not None and not self.works_on_parts(function, tensor, args, kwargs):
                self.uses[layer].add(name.strip("_"))
            elif layer is not None and function is not functional.cross_entropy:
                for result in outputs:
                    result.__dict__["_features_of"] = layer
        if outputs and inputs:
            if self.blocks.isdisjoint(self.running):
                for tensor in inputs:
                    tensor.__dict__["_is_used_outside"] = True
                    if "_is_of_block" in tensor.__dict__:
                        self.leaked_layers |= sources(tensor)
            else:
                for tensor in outputs:
                    if all(tensor is not given for given in inputs):
                        tensor.__dict__["_is_of_block"] = True
            running = tuple(self.running)
            for tensor in outputs:
                if all(tensor is not given for given in inputs):
                    tensor.__dict__["_made_in"] = running
            found = _NONE.union(*map(sources, inputs))
            ancestors = _NONE.union(*map(_ancestors, inputs))
            for tensor in outputs:
                _mark(tensor, found, ancestors)


SomeDataflow = TypeVar("SomeDataflow", bound=Dataflow)


def record_step(
    make: Callable[[], SomeDataflow], root: nn.Module, step: Callable[..., Any], device: torch.device
) -> tuple[SomeDataflow, str]:
    """Run a step on fakes, and record its data flow.

    If the step's own code fails, perhaps because it needs what hooks of the run set, or optimizers, it runs again as in
    a run: these hooks may have effects outside of the module, and are not called unless they are needed.

    Args:
        make: Function that makes the record of one run.
        root: The model, on any device; it is unchanged afterwards.
        step: Function that runs the step. It is given a function that makes a fake of a tensor, and the arguments
            ``on_log``, a function to call with everything that the step logs, and perhaps ``is_in_run=True``.
        device: Device that the fakes pretend to be on.

    Returns:
        The record; and why the step could not run to its end, or an empty text.
    """
    flow = make()
    why_not = run_on_fakes(root, partial(step, on_log=flow.on_log), device, flow)
    if isinstance(why_not, FailureReason) and why_not.is_of_own_code:
        other = make()
        if not run_on_fakes(root, partial(step, on_log=other.on_log, is_in_run=True), device, other):
            return other, ""
    return flow, why_not


class _Functions(TorchFunctionMode):
    def __init__(self, dataflow: Dataflow) -> None:
        super().__init__()
        self._dataflow = dataflow
        self._operations = _Operations(dataflow)

    def __enter__(self) -> _Functions:
        self._operations.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._operations.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._dataflow.on_function(func, args, kwargs or {}, out)
        return out


class _Operations(DispatchMode):
    """Observe which operations draw random numbers, also those that torch's own functions call."""

    def __init__(self, dataflow: Dataflow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dataflow = dataflow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if draws_numbers(func, args, kwargs or {}):
            self._dataflow.on_draw(out, func.namespace == "aten")
        return out


def _holds_for_several_tokens(drawn: Tensor) -> bool:
    """Return whether random numbers have one value for several tokens, which lie along dimension -2."""
    size = drawn.shape[-2] if drawn.ndim > 1 else 1
    return isinstance(size, int) and size == 1  # Symbolic sizes depend on values.


def is_stream(tensor: Tensor, hidden: Tensor) -> bool:
    """Return whether ``tensor`` is ``hidden``, or computed from it by norms and sums without a layer in between."""
    return tensor.shape == hidden.shape and sources(tensor) >= sources(hidden)


def is_used_outside(tensor: Tensor) -> bool:
    """Return whether code outside of the blocks passed ``tensor`` to a function."""
    return "_is_used_outside" in tensor.__dict__


def is_learned(tensor: Tensor) -> bool:
    """Return whether ``tensor`` was computed from layers or free parameters, so that it needs a gradient."""
    return bool(_ancestors(tensor) - BATCH)


def _mark(tensor: Tensor, its_sources: frozenset[str], ancestors: frozenset[str]) -> None:
    tensor.__dict__["_sources"], tensor.__dict__["_ancestors"] = its_sources, ancestors


def sources(tensor: Tensor) -> frozenset[str]:
    """Return the names of the layers and free parameters that ``tensor`` was computed from with no layer in between.

    Tensors computed from the batch have :data:`BATCH` among their sources.
    """
    found: frozenset[str] = tensor.__dict__.get("_sources", _NONE)
    return found


def _ancestors(tensor: Tensor) -> frozenset[str]:
    ancestors: frozenset[str] = tensor.__dict__.get("_ancestors", _NONE)
    return ancestors
