"""Which linear layers reach which, with no other one between: found in one step on fake tensors.

A tensor's *sources* are the layers (linear, convolution, embedding) that it was computed from with no other layer
between; its *ancestors* are all that it was computed from. A *residual* sum adds to a tensor what layers have made of
that tensor: the sources of the first are among the ancestors of the second.
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

from lightning_dist.tensor_parallel.split_logits import works_on_parts
from lightning_dist.tracing import tensors_in

__all__ = ["Call", "Provenance", "is_learned", "is_stream", "is_used_outside"]

_INPUT = frozenset({"<the batch>"})
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
    """

    blocks: frozenset[str]
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

    def __post_init__(self) -> None:
        self.functions = _Functions(self)
        self._num_blocks_running = 0

    def on_input(self, tensor: Tensor) -> None:
        """A tensor of the batch is a source of its own."""
        _mark(tensor, _INPUT, _INPUT)

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what reaches a module."""
        self._num_blocks_running += name in self.blocks
        if any(True for _ in module.parameters(recurse=False)):
            for tensor in tensors_in((args, kwargs)):
                self.into[name] |= _sources(tensor)

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A layer is the only source of what it returns."""
        self._num_blocks_running -= name in self.blocks
        self.calls.append(Call(name, args, kwargs, out))
        if any(param.ndim > 1 for param in module.parameters(recurse=False)):
            self.called.add(name)
            ancestors = _INPUT.union(*(_ancestors(tensor) for tensor in tensors_in((args, kwargs))), {name})
            for tensor in tensors_in(out):
                _mark(tensor, frozenset({name}), ancestors)
                tensor.__dict__["_features_of"] = name

    def on_end(self, result: Any) -> None:
        """Nothing is looked at that the step has left."""

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """What a function returns has the sources of all that it was given."""
        name = getattr(function, "__name__", "")
        is_attention = name == "scaled_dot_product_attention" and kwargs.get("dropout_p")
        self.draws_random |= bool(name in _RANDOM or is_attention)
        inputs = list(tensors_in((args, kwargs)))
        if function in _SUMS and len(inputs) == 2:
            for stream, added in (inputs, reversed(inputs)):
                is_residual = _sources(stream) and _sources(stream) <= _ancestors(added)
                if is_residual and not _sources(added) <= _ancestors(stream):
                    self.residual |= _sources(added) - _sources(stream)
        outputs = list(tensors_in(out))
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
            sources = _NONE.union(*map(_sources, inputs))
            ancestors = _NONE.union(*map(_ancestors, inputs))
            for tensor in outputs:
                _mark(tensor, sources, ancestors)


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
    return tensor.shape == hidden.shape and _sources(tensor) >= _sources(hidden)


def is_used_outside(tensor: Tensor) -> bool:
    """Whether a function outside of the blocks was given ``tensor``."""
    return "_is_used_outside" in tensor.__dict__


def is_learned(tensor: Tensor) -> bool:
    """Whether a layer had part in ``tensor``, so that it needs a gradient."""
    return bool(_ancestors(tensor) - _INPUT)


def _mark(tensor: Tensor, sources: frozenset[str], ancestors: frozenset[str]) -> None:
    tensor.__dict__["_sources"], tensor.__dict__["_ancestors"] = sources, ancestors


def _sources(tensor: Tensor) -> frozenset[str]:
    sources: frozenset[str] = tensor.__dict__.get("_sources", _NONE)
    return sources


def _ancestors(tensor: Tensor) -> frozenset[str]:
    ancestors: frozenset[str] = tensor.__dict__.get("_ancestors", _NONE)
    return ancestors
