"""Run chosen modules in float32 while the others run in a lower precision.

A router, a head or a norm may need more than the 8 significant bits of bfloat16. Such a module keeps its class, its
names and its hooks. Only ``forward`` is replaced, on the instance: it runs without autocast, on inputs that are cast to
float32. If parameters are sharded, those of the module are gathered in float32.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist._compat import tree_map
from lightning_dist.model.units import Unit
from lightning_dist.techniques.protocol import ParameterRules, Rows

__all__ = ["Float32Modules", "refuse_other_patterns"]


class Float32Modules(ParameterRules):
    """Run the modules that ``patterns`` match, and all modules inside them, in float32.

    Args:
        root: The model, whose parameters are stored in float32. It is never matched itself.
        patterns: Patterns in the style of a shell, such as ``"*.router"``. A pattern matches a module by its class's
            name, by its full name, or by the end of its full name from a dot on.
        device_type: Type of the device that the model runs on, on which autocast is switched off.

    Raises:
        ValueError: If a pattern matches no module with parameters, or a matched parameter is stored in a lower
            precision.
    """

    def __init__(self, root: nn.Module, patterns: Sequence[str], device_type: str) -> None:
        self.patterns = tuple(patterns)
        matched = _matched(root, self.patterns)
        self._num_matched = len(matched)
        self._modules = {inside for module in matched.values() for inside in module.modules()}
        self._numel: dict[int, int] = {}
        for name, top in matched.items():
            for key, param in top.named_parameters():
                if param.dtype in _HALF:
                    raise ValueError(
                        f"keep_fp32={list(self.patterns)!r}: the parameter {name}.{key} is stored in"
                        f" {str(param.dtype).removeprefix('torch.')}. Create it in float32."
                    )
        refuse_other_patterns(root, self.patterns)
        for module in self._modules:
            if type(module).forward is not nn.Module.forward and module not in _changed:
                _run_in_float32(module, device_type)
                _changed.add(module)

    def param_dtype(self, owner: nn.Module) -> torch.dtype | None:
        """Return float32 for a module that runs in float32, and None for any other."""
        return torch.float32 if owner in self._modules else None

    def prepare_unit(self, unit: Unit) -> None:
        """Count the parameters of ``unit`` that are computed in float32."""
        owners = [owner for owner in unit.owners if owner in self._modules]
        kept = {id(param) for owner in owners for param in owner.parameters(recurse=False)}
        self._numel[id(unit)] = sum(param.numel() for param in unit.params.values() if id(param) in kept)

    def numel_in_float32(self, unit: Unit) -> int:
        """Return the number of elements of those parameters of ``unit`` that are computed in float32."""
        return self._numel.get(id(unit), 0)

    def table_rows(self) -> Rows:
        """Return a row that says what runs in float32."""
        yield "in float32", f"{self._num_matched} modules that match {', '.join(self.patterns)}"


_patterns: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""The patterns of each model that was made parallel."""

_changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that have got another forward."""


def refuse_other_patterns(root: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse patterns that differ from those with which ``root`` was made parallel for the first time.

    Where nothing is sharded, a later Trainer may make the same module parallel again, whose forwards have changed.

    Raises:
        ValueError: If they differ.
    """
    before = _patterns.setdefault(root, tuple(patterns))
    if before != tuple(patterns):
        raise ValueError(
            f"An earlier Trainer has made this {type(root).__name__} run with keep_fp32={list(before)}, which cannot be"
            f" changed to {list(patterns)}. Make a new one, and load the weights from a checkpoint."
        )


_HALF = (torch.float16, torch.bfloat16)


def _matched(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules inside ``root`` that a pattern matches, by full name.

    Raises:
        ValueError: If a pattern matches no module with parameters.
    """
    inside = {name: module for name, module in root.named_modules() if name and any(True for _ in module.parameters())}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        own = {
            name: module
            for name, module in inside.items()
            if fnmatchcase(type(module).__name__, pattern)
            or fnmatchcase(name, pattern)
            or fnmatchcase(name, f"*.{pattern}")
        }
        if not own:
            known = {type(module).__name__ for module in inside.values()} | {name.rpartition(".")[2] for name in inside}
            close = difflib.get_close_matches(pattern, [*sorted(known), *inside], n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(
                f"keep_fp32={list(patterns)!r}: {pattern!r} matches no module with parameters{hint} Give names of"
                f" classes such as {next(iter(sorted({type(m).__name__ for m in inside.values()})), 'LayerNorm')!r}, or"
                f" of modules such as {next(reversed(inside), 'lm_head')!r}."
            )
        found |= own
    return found


def _run_in_float32(module: nn.Module, device_type: str) -> None:
    """Replace the forward of ``module`` by one that switches autocast off and casts inputs to float32.

    The new forward is a method, which a copy of the module binds to itself. Without autocast, it changes nothing.
    """
    forward: Any = module.forward
    is_bound = isinstance(forward, MethodType) and forward.__self__ is module
    function = forward.__func__ if is_bound else lambda self, *args, **kwargs: forward(*args, **kwargs)

    @wraps(function)
    def in_float32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device_type):
            return function(self, *args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(self, *tree_map(_widened, args), **tree_map(_widened, kwargs))

    module.forward = MethodType(in_float32, module)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
