"""Which linear layers reach which, with no other one between: found in one step on fake tensors.

A tensor's *sources* are the layers (linear, convolution, embedding) that it was computed from with no other layer
between; its *ancestors* are all that it was computed from. A *residual* sum adds to a tensor what layers have made of
that tensor: the sources of the first are among the ancestors of the second.

A *free* parameter is one that the code of a module with layers in it uses by itself, such as a bias that is added to
the queries. It is a source too, by its full name. So is the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_dist.tensor_parallel.layers import linear_layer
from lightning_dist.tensor_parallel.split_logits import works_on_parts
from lightning_dist.tracing import tensors_in

__all__ = ["BATCH", "Call", "Provenance", "is_learned", "is_stream", "is_used_outside", "sources"]

BATCH = frozenset({"<the batch>"})
"""The source of what the step is given."""

_NONE: frozenset[str] = frozenset()
_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_RANDOM = [
    "dropout",
    "dropout_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "bernoulli",
    "bernoulli_",
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "multinomial",
    "normal",
    "normal_",
    "uniform_",
]


@dataclass(frozen=True)
class Call:
    """A call of one of the modules whose calls are kept.

    Args:
        name: The module's.
        args: What it was given.
        kwargs: What it was given by keyword.
        output: What it returned.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass
class Provenance:
    """Observes a step (see :func:`lightning_dist.tracing.run_on_fakes`).

    Args:
        blocks: Names of the model's blocks.
        root: The model; its parameters are known by their full names, tied ones by the first.
    """

    blocks: frozenset[str]
    root: nn.Module
    calls: list[Call] = field(default_factory=list)
    """Of all modules, in the order in which they returned."""
    called: set[str] = field(default_factory=set)
    """Layers that have run."""
    into: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """A module with parameters to the sources of its inputs."""
    residual: set[str] = field(default_factory=set)
    """Layers that are the second of a residual sum."""
    draws_random: bool = False
    """Whether a function was called that draws random numbers."""
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """A layer to the functions of its output that cannot work on parts of its features."""
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """A parameter to the modules whose own code gives it to a function; the model itself is ``""``."""
    used_later: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """A module to those of the tensors it returns, by their index, that a function is given after it has returned."""

    def __post_init__(self) -> None:
        self.functions = _Functions(self)
        self._num_blocks_running = 0
        self._running: list[str] = []
        self._parameters: dict[int, str] = {}  # the fakes that stand in for them during the step

    def on_input(self, tensor: Tensor) -> None:
        """A tensor of the batch is a source of its own."""
        _mark(tensor, BATCH, BATCH)

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what reaches a module."""
        self._num_blocks_running += name in self.blocks
        self._running.append(name)
        if any(True for _ in module.parameters(recurse=False)):
            for tensor in tensors_in((args, kwargs)):
                self.into[name] |= sources(tensor)

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A layer is the only source of what it returns."""
        self._num_blocks_running -= name in self.blocks
        while self._running and self._running.pop() != name:  # those that have raised do not return
            pass
        self.calls.append(Call(name, args, kwargs, out))
        for index, tensor in enumerate(tensors_in(out)):
            tensor.__dict__.setdefault("_returned_by", []).append((name, index))
        if any(param.ndim > 1 for param in module.parameters(recurse=False)):
            self.called.add(name)
            ancestors = BATCH.union(*(_ancestors(tensor) for tensor in tensors_in((args, kwargs))), {name})
            for tensor in tensors_in(out):
                _mark(tensor, frozenset({name}), ancestors)
                tensor.__dict__["_features_of"] = name

    def on_end(self, result: Any) -> None:
        """Nothing is looked at that the step has left."""

    def _returns_features_in(self, name: str, tensor: Tensor) -> bool:
        """Return whether a layer's features can be a dimension of ``tensor``: not where it is attention scores."""
        layer = linear_layer(self.root.get_submodule(name)) if name in self.called else None
        sizes = [size for size in tensor.shape if isinstance(size, int)]  # others depend on values
        return layer is None or layer.out_features in sizes or len(sizes) < tensor.ndim

    def _note_reader(self, param: nn.Parameter) -> None:
        """Note which module uses a parameter, and let a free one be a source."""
        if not self._parameters:
            self._parameters = {id(param): name for name, param in self.root.named_parameters()}
        name = self._parameters.get(id(param))
        if name is None:
            return
        reader = self._running[-1] if self._running else ""
        self.readers[name].add(reader)
        if any(True for _ in self.root.get_submodule(reader).children()):
            _mark(param, frozenset({name}), frozenset({name}))

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """What a function returns has the sources of all that it was given."""
        name = getattr(function, "__name__", "")
        is_attention = name == "scaled_dot_product_attention" and kwargs.get("dropout_p")
        self.draws_random |= bool(name in _RANDOM or is_attention)
        inputs = list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(out))
        for tensor in inputs if outputs else ():  # what returns no tensor has asked for a shape or a dtype
            if isinstance(tensor, nn.Parameter):
                self._note_reader(tensor)
            for module, index in tensor.__dict__.get("_returned_by", ()):
                if module not in self._running:
                    self.used_later[module].add(index)
        if function in _SUMS and len(inputs) == 2:
            for stream, added in (inputs, reversed(inputs)):
                of_stream, of_added = sources(stream) - BATCH, sources(added) - BATCH
                # Attention scores are sums too, of terms that share the queries or the keys.
                is_residual = of_stream and of_stream <= _ancestors(added) and of_stream.isdisjoint(of_added)
                if is_residual and not of_added <= _ancestors(stream):
                    self.residual |= {name for name in of_added if self._returns_features_in(name, added)}
        if name == "__setitem__":
            outputs = inputs[:1]
        for tensor in inputs if outputs else ():
            layer = tensor.__dict__.get("_features_of")
            if layer is not None and not works_on_parts(function, tensor, args, kwargs):
                self.uses[layer].add(name.strip("_"))
            elif layer is not None and function is not functional.cross_entropy:
                for result in outputs:
                    result.__dict__["_features_of"] = layer
        if outputs and inputs:
            if not self._num_blocks_running:
                for tensor in inputs:
                    tensor.__dict__["_is_used_outside"] = True
            found = _NONE.union(*map(sources, inputs))
            ancestors = _NONE.union(*map(_ancestors, inputs))
            for tensor in outputs:
                _mark(tensor, found, ancestors)


class _Functions(TorchFunctionMode):
    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._provenance.on_function(func, args, kwargs or {}, out)
        return out


def is_stream(tensor: Tensor, hidden: Tensor) -> bool:
    """Whether ``tensor`` is ``hidden`` or what became of it between layers: normed, or with something added."""
    return tensor.shape == hidden.shape and sources(tensor) >= sources(hidden)


def is_used_outside(tensor: Tensor) -> bool:
    """Whether a function outside of the blocks was given ``tensor``."""
    return "_is_used_outside" in tensor.__dict__


def is_learned(tensor: Tensor) -> bool:
    """Whether a layer had part in ``tensor``, so that it needs a gradient."""
    return bool(_ancestors(tensor) - BATCH)


def _mark(tensor: Tensor, its_sources: frozenset[str], ancestors: frozenset[str]) -> None:
    tensor.__dict__["_sources"], tensor.__dict__["_ancestors"] = its_sources, ancestors


def sources(tensor: Tensor) -> frozenset[str]:
    """Return the names of the layers and free parameters that ``tensor`` comes from with no other layer between."""
    found: frozenset[str] = tensor.__dict__.get("_sources", _NONE)
    return found


def _ancestors(tensor: Tensor) -> frozenset[str]:
    ancestors: frozenset[str] = tensor.__dict__.get("_ancestors", _NONE)
    return ancestors
